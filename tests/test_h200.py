"The verdicts of the studies on a real model, recomputed from the rows that are kept."
import json, shutil
from datetime import datetime
from pathlib import Path
import pytest
from rxnb.preflight import wanted_preflights
from rxnb.records import completed, read_rows
from rxnb.spec import load_spec
from rxnb.study import decide

results = Path(__file__).parents[1]/'nbs'/'results'
SECOND = ('h200_gs1_2','h200_tailrl_lag_2','h200_tailrl_graded_2','h200_centering_2','h200_centering_r4_2')
each_study = pytest.mark.parametrize('name', ['h200_gs1','h200_tailrl_lag','h200_centering',*SECOND])

@each_study
def test_the_kept_rows_give_the_verdict_of_the_day(name, tmp_path):
    "decision.json was written on the machine that trained; the same function reads the kept rows."
    shutil.copytree(results/name, tmp_path/name)
    stored = json.loads((tmp_path/name/'decision.json').read_text())
    (tmp_path/name/'decision.json').unlink()
    study = load_spec(tmp_path/name/'spec.json')
    assert decide(study, tmp_path).outcome==stored['outcome']
    assert json.loads((tmp_path/name/'decision.json').read_text())==stored
    assert stored['spec_sha256']==study.sha256==json.loads((tmp_path/name/'sealed.json').read_text())['sha256']

@each_study
def test_a_changed_row_changes_what_is_decided(name, tmp_path):
    "The verdict is made of the rows, not of the file beside them."
    shutil.copytree(results/name, tmp_path/name)
    study = load_spec(tmp_path/name/'spec.json')
    before = decide(study, tmp_path)
    rule = study.decision_rule
    arm = next(a for a,w in study.weights(rule if rule.method=='threshold' else rule.criteria[0]).items() if w>0)
    f = completed(study, arm, tmp_path)[0]/'eval.jsonl'
    f.write_text(''.join(json.dumps(dict(r, correct=1))+'\n' for r in read_rows(f)))
    value = lambda d: getattr(d, 'gap', None) if rule.method=='threshold' else d.mean
    assert value(decide(study, tmp_path))>value(before)+.5

@each_study
def test_sealed_before_the_first_step(name):
    "Every arm began after its study was sealed, under that spec, and graded the whole test split after all its steps."
    sealed, manifests = json.loads((results/name/'sealed.json').read_text()), list(results.glob(f'{name}/*/attempt_*/manifest.json'))
    at = datetime.fromisoformat(sealed['time_utc'].replace('Z', '+00:00')).timestamp()
    assert manifests
    for manifest in manifests:
        m = json.loads(manifest.read_text())
        assert m['started_s']>at
        assert m['spec_sha256']==sealed['sha256'] and m['task']['eval_split']=='test' and m['task']['train_split']=='train[4352:]'
        steps,last = read_rows(manifest.parent/'steps.jsonl'), json.loads((manifest.parent/'result.json').read_text())
        assert len(steps)==32==last['steps'] and last['eval']['n']==1319

@pytest.mark.parametrize('name', SECOND)
def test_the_second_series_is_what_was_sealed_and_complete(name):
    "The seal and every preflight are of the spec that is kept, all lines of it held, and no arm is missing."
    study = load_spec(results/name/'spec.json')
    sealed = json.loads((results/name/'sealed.json').read_text())
    assert sealed['sha256']==study.sha256==load_spec(sealed['spec']).sha256
    preflights = json.loads((results/name/'preflight.json').read_text())
    assert {r['name'] for r in preflights}==set(wanted_preflights(study.spec))
    for r in preflights: assert r['spec_sha256']==study.sha256 and r['passed'] and r['lines'] and all(l['passed'] for l in r['lines'])
    assert all(completed(study, a.name, results) for a in study.arms)
    gates = read_rows(results/name/'gates.jsonl') if study.spec.activation_gate else []
    assert all(g['passed'] for g in gates) and bool(gates)==bool(study.spec.activation_gate)
