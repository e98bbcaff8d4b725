"The kernel lab from end to end: what a run logs is a table, and the table says what training subtracted."
import subprocess, sys
import numpy as np, pandas as pd
from rxnb.family import Kernel, Windows, baselines
from rxnb.records import attempts
from rxnb.spec import load_spec
from rxnb.study import execute
from rxnb.tables import as_stream, from_run
from rxnb.tasks import load_task, prompt_order

def test_the_log_of_a_run_gives_the_baselines_it_was_trained_with(tmp_path):
    study = load_spec('gs1_lab_tiny')
    execute(study, 'gs1_lab', 'pilot', runs_dir=tmp_path)
    attempt = attempts(study, 'gs1_lab', tmp_path, 'pilot')[-1][0]
    stream = as_stream(from_run(attempt, {p.id: p.question for p in load_task('arith','train')}))
    p = study.arm('gs1_lab').advantage.params
    kernel = Kernel(p['groups'], p['half_life_steps'] or None, p['shrinkage'], p['min_mass'])
    b = baselines(kernel, Windows(stream, p['window'], kernel.on, dtype='float64'))
    logged = pd.read_parquet(attempt/'rollouts.parquet')
    assert len(logged)==128 and stream.prompt_ids_P.tolist()==logged.prompt_id.tolist()
    assert np.abs(b.baseline_Qm[:,0]-logged.baseline).max()<1e-9 and logged.baseline.std()>.01

def test_a_table_is_collected_from_the_command_line(tmp_path):
    out = tmp_path/'new'/'t.parquet'
    r = subprocess.run([sys.executable,'-m','rxnb.collect','--spec','gs1_tiny','--task','arith','--split','train','--m','2','--prompts','6','--per-step','3','--seed','1','--name','here','--no-hidden','--out',out], capture_output=True, text=True, timeout=300)
    assert r.returncode==0 and f'{out}:' in r.stdout, r.stderr
    t,problems = pd.read_parquet(out), load_task('arith','train')
    assert t.groupby(['step','prompt_id'], sort=False).size().tolist()==[2]*6 and t.step.unique().tolist()==[0,1]
    assert t.prompt_id.unique().tolist()==[problems[i].id for i in prompt_order(len(problems), 1)[:6]]
