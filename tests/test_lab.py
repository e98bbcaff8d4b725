"The kernel lab from end to end: what a run logs is a table, and the table says what training subtracted."
import numpy as np, pandas as pd
from rxnb.family import Kernel, Windows, baselines
from rxnb.records import attempts
from rxnb.spec import load_spec
from rxnb.study import execute
from rxnb.tables import as_stream, from_run
from rxnb.tasks import load_task

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
