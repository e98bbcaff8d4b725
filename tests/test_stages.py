"Every preflight and every gate in `run_study.ipynb`, as its users run it; and the registered calibration of a lag, once and not twice."
import copy, json, subprocess, sys
from collections import Counter
from pathlib import Path
import nbformat, pytest
from rxnb.findings import GATE_METRICS
from rxnb.preflight import not_ready, wanted_preflights
from rxnb.records import attempts, completed, read_rows
from rxnb.spec import in_force, load_spec
from rxnb.stages import run_pilot
from rxnb.study import execute

root = Path(__file__).parents[1]

@pytest.fixture(scope='module')
def ran(tmp_path_factory):
    "gates_tiny through papermill at a shell: (study, folder of the runs, what each cell shows)."
    tmp = tmp_path_factory.mktemp('gates')
    call = subprocess.run([Path(sys.executable).parent/'papermill', root/'nbs'/'run_study.ipynb', tmp/'out.ipynb', '-p','spec','gates_tiny', '-p','runs_dir',tmp], cwd=root, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=1200)
    assert call.returncode==0, call.stderr[-2000:]
    shown = lambda c: '\n'.join(o.get('text') or o.get('data',{}).get('text/markdown') or o.get('data',{}).get('text/plain','') for o in c.get('outputs',[]))
    return load_spec('gates_tiny'), tmp, [shown(c) for c in nbformat.read(tmp/'out.ipynb', 4).cells if c.cell_type=='code']

def test_it_registers_everything():
    spec = load_spec('gates_tiny').spec
    assert {c.metric for c in spec.activation_gate.checks}==set(GATE_METRICS)
    assert {n.split('/')[0] for n in wanted_preflights(spec)}=={'correctness','probe','endpoint','restoration','generation','feasibility'}

def test_every_stage_is_shown_in_order(ran):
    study,_,cells = ran
    first = lambda text: next(i for i,c in enumerate(cells) if text in c)
    at = [first('half-width'), first('**correctness/loss_and_advantages**: passed'), first('All gates passed'), first('**feasibility**: passed'), cells.index('[]'), first(in_force(study, ran[1]).sha256), first('**inconclusive**, all criteria together')]
    assert at==sorted(set(at)) # nothing stands against the full run before it begins
    tried = cells[first('**correctness/')]
    order = [tried.index(f'**{n}**: passed') for n in wanted_preflights(study.spec) if n!='feasibility']
    assert order==sorted(order)

def test_the_calibration_was_made_once_and_the_failed_pilot_stays(ran):
    study,runs,_ = ran
    now = in_force(study, runs)
    amendment, = read_rows(runs/study.name/'amendments.jsonl')
    assert amendment['calibration'] and not amendment['outcome_data'] and amendment['parent']==study.sha256
    assert [(c['path'], c['old'], c['new']) for c in amendment['changes']]==[('arms.gs1_kernel.advantage.params.bandwidth', .5, 1.)]
    gates = read_rows(runs/study.name/'gates.jsonl')
    failed = {n: [r['metric'] for r in gates if r['round']==n and not r['passed']] for n in (1,2)}
    assert failed=={1: ['kernel_effective_neighbors_p10'], 2: []} and max(r['round'] for r in gates)==2
    kernel = runs/study.name/'gs1_kernel'
    assert {r['spec_sha256'] for r in read_rows(kernel/'pilot_1'/'steps.jsonl')}=={study.sha256} and {r['spec_sha256'] for r in read_rows(kernel/'pilot_2'/'steps.jsonl')}=={now.sha256}
    assert Counter(p.name for p in (runs/study.name).glob('*/pilot_*'))=={'pilot_1':4, 'pilot_2':1} # the other arms count on

def test_the_full_run_carries_what_was_calibrated(ran):
    study,runs,_ = ran
    now = in_force(study, runs)
    assert not_ready(now, runs)==[] and json.loads((runs/study.name/'decision.json').read_text())['spec_sha256']==now.sha256
    manifest = json.loads((completed(now, 'gs1_kernel', runs)[0]/'manifest.json').read_text())
    assert manifest['advantage']['params']['bandwidth']==1. and manifest['spec_sha256']==now.sha256

def test_a_lag_is_calibrated_once_and_stays_failed(tmp_path):
    "Lag 4 to 8, all lagged arms and the bounds of the check together; a pilot that fails again is final."
    raw = copy.deepcopy(load_spec('gates_tiny').raw)
    keep = ('executed_sampler_lag_steps','kl_behavior_current_ratio_lag4_over_lag0')
    checks = [dict(c, steps=[4,11], **({'min':1e30} if c['metric']==keep[1] else {})) for c in raw['activation_gate']['checks'] if c['metric'] in keep]
    arms = [dict(a, group_size=1, groups_per_batch=6, advantage=dict(name='batch_mean', params={})) for a in raw['arms'] if a['name'] in ('grpo_lag0','grpo_lag4')]
    raw.update(name='lag', batch_size=6, steps=13, pilot_steps=12, arms=arms, roles={}, decision_rule=None, preflight=None, correctness_preflight=None, restoration_preflight=None, references=[], feasibility_required=False, feasibility=None,
        generation_audit=None, experiment_features=None, activation_gate=dict(raw['activation_gate'], checks=checks, calibration=dict(metric=keep[1], parameter='arms.*.lag.updates', values=[4,8], max_pilot_steps=12, max_wall_minutes=30.)))
    study = load_spec(raw)
    gates = run_pilot(study, tmp_path)
    now = in_force(study, tmp_path)
    assert gates.failed==[keep[1]] and [a.lag.updates for a in now.arms]==[0,8]
    assert [(c.min, c.max) for c in now.gates if c.metric==keep[0]]==[(8,8)]
    amendment, = read_rows(tmp_path/'lag'/'amendments.jsonl')
    assert amendment['calibration'] and 'min' in str([c['path'] for c in amendment['changes']])
    rounds = read_rows(tmp_path/'lag'/'gates.jsonl')
    assert [[r['value'] for r in rounds if r['round']==n and r['metric']==keep[0]] for n in (1,2)]==[[[4]],[[8]]]
    lags = {p.name: max(r['lag'] for r in read_rows(p/'steps.jsonl')) for p in (tmp_path/'lag'/'grpo_lag4').glob('pilot_*')}
    assert lags=={'pilot_1': 4, 'pilot_2': 8} # the failed pilot's rows stay
    assert len(attempts(now, 'grpo_lag0', tmp_path, 'pilot'))==1 # its lag is 0: nothing changed
    before = {p: p.stat().st_mtime_ns for p in tmp_path.rglob('*.jsonl')}
    assert run_pilot(study, tmp_path).failed==[keep[1]] and before=={p: p.stat().st_mtime_ns for p in tmp_path.rglob('*.jsonl')} # not a second time
    with pytest.raises(ValueError, match=f'gates: {keep[1]}'): execute(study, 'grpo_lag0', runs_dir=tmp_path)
