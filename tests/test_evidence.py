"Rows of the cases file about gates and runs; those about specs and decisions are in test_cases."
import json
from pathlib import Path
from types import SimpleNamespace
import pytest
from rxnb.gates import executed_lag, standing, Evidence, Pilot

cases = Path(__file__).parents[2]/'shared'/'cases'/'cases.jsonl'

def case(id):
    if not cases.exists(): pytest.skip(f'no {cases}: the cases do not ship with the package')
    row = next(r for r in map(json.loads, cases.read_text().splitlines()) if r['id']==id)
    return row['input'],row['expected']

def steps(lags): return [dict(step=t, version=t, lag=k) for t,k in enumerate(lags)]

def test_v01_the_gate_names_its_steps():
    given,want = case('v01')
    seen = executed_lag(steps(want['executed_lag']), given['LAG'])
    assert seen.value==[given['LAG']] and seen.what==f'steps {given["LAG"]} to {given["steps"]-1}'

def test_v02_a_sawtooth_is_no_fixed_lag():
    given,want = case('v02')
    assert executed_lag(steps(want['executed_lag']), 4).value==[0,1,2,3]

def test_r07_every_completion_hits_the_limit():
    given,_ = case('r07')
    pilot = Pilot(SimpleNamespace(name='a'), [dict(rollouts=64, truncated_frac=given['clipped_ratio'])], [dict(prompt_id='gsm8k/train/1')], {}, '')
    gate = standing(Evidence({}, {'a': pilot}, {}, 'gsm8k/train/'))[0]
    assert not gate.passed and 'every completion hits the limit' in gate.reason
