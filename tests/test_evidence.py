"Rows of the cases file about decisions, gates and runs, and the stages in processes of their own."
import json
from pathlib import Path
from types import SimpleNamespace
import pytest
from rxnb.decision import secondary, threshold_rule
from rxnb.gates import executed_lag, standing, Evidence, Pilot
from rxnb.intervals import mcnemar_exact
from rxnb.records import append_rows, open_attempt
from rxnb.spec import load_spec
from rxnb.study import decide

cases = Path(__file__).parents[2]/'shared'/'cases'/'cases.jsonl'

def case(id):
    if not cases.exists(): pytest.skip(f'no {cases}: the cases do not ship with the package')
    row = next(r for r in map(json.loads, cases.read_text().splitlines()) if r['id']==id)
    return row['input'],row['expected']

def steps(lags): return [dict(step=t, lag=k) for t,k in enumerate(lags)]

def test_v01_the_gate_names_its_steps():
    given,want = case('v01')
    seen = executed_lag(steps(want['executed_lag']), given['LAG'])
    assert seen.value==[given['LAG']] and seen.what==f'steps {given["LAG"]} to {given["steps"]-1}'

def test_v02_a_sawtooth_is_no_fixed_lag():
    given,want = case('v02')
    assert executed_lag(steps(want['executed_lag']), 4).value==[0,1,2,3]

def test_s11_mcnemar():
    given,want = case('s11')
    assert mcnemar_exact(given['b_only_a'], given['c_only_b'])==pytest.approx(want['mcnemar_exact_p'], abs=1e-6)

def test_s14_grey_zone():
    given,want = case('s14')
    right = lambda k: {i: int(i<k) for i in range(100)}
    gap = round(100*given['observed'])
    items = dict(t=right(50+gap), b=right(50))
    assert threshold_rule(items, {a: {50: v, 100: v} for a,v in items.items()}, 't', 'b', .04, .02).outcome==want['decision']

def test_s16_the_same_seed_twice():
    given,want = case('s16')
    items = dict(a={i: i%2 for i in range(200)}, b={i: int(i%3==0) for i in range(200)})
    once = [secondary(items, dict(a=1, b=-1), seed=given['bootstrap_seed']) for _ in range(given['calls'])]
    assert (once[0]==once[1])==want['equal'] and secondary(items, dict(a=1, b=-1), seed=8)!=once[0]

def test_s17_a_partial_evaluation_decides_nothing(tmp_path):
    given,want = case('s17')
    study = load_spec('gs1_tiny')
    for a in study.arms:
        at = open_attempt(study, a.name, tmp_path)
        at.append('rollouts', [dict(step=0)])
        at.append('eval', [dict(item_id=i, correct=1, grader='marker-1') for i in range(given['eval_done'])])
        at.finish('succeeded', steps=40)
    with pytest.raises(ValueError, match=f'{given["eval_done"]} of {study.spec.eval.n_examples}'): decide(study, tmp_path)
    assert not (tmp_path/study.name/'decision.json').exists()

def test_r07_every_completion_hits_the_limit():
    given,_ = case('r07')
    pilot = Pilot(SimpleNamespace(name='a'), [dict(rollouts=64, truncated_frac=given['clipped_ratio'])], [dict(prompt_id='gsm8k/train/1')], {}, '')
    gate = standing(Evidence({}, {'a': pilot}, {}, 'gsm8k/train/'))[0]
    assert not gate.passed and 'every completion hits the limit' in gate.reason
