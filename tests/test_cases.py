"Cases of what a spec may hold and what may be decided from it: `cases.json` says each in words and figures, and has one test here."
import copy, json, re
from pathlib import Path
import pytest
from rxnb.decision import hoeffding_half_width, items_needed, items_of, paired_hoeffding, paired_values, reach, secondary, threshold_rule
from rxnb.findings import one_sided, over_budget, projected_hours
from rxnb.intervals import mcnemar_exact
from rxnb.records import open_attempt
from rxnb.spec import amend, in_force, load_spec, seal
from rxnb.study import decide, execute

here = Path(__file__).parent
def of_areas(*areas): return {r['id']: r for r in json.loads((here/'cases.json').read_text(encoding='utf-8')) if r['area'] in areas}

AREAS = ('spec','stats')
CASES = of_areas(*AREAS)

def case(id): return CASES[id]['given'],CASES[id]['want']
def of(study, code): return [f for f in study.findings if f.code==code]
def tiny(**changes): return dict(copy.deepcopy(load_spec('gs1_tiny').raw), **changes)
def right(k, n=100): return {i: int(i<k) for i in range(n)}

def test_p01_optimizer_defaults():
    given,want = case('p01')
    f, = of(load_spec(tiny(command=given['command'])), 'optimizer')
    assert f.blocks('preflight') and f.mend=='write every optimizer field out'
    assert f'eps {want["executed"]["eps"]:g} (SDK default)' in f.message and f'registered is {given["registered"]["eps"]:g}' in f.message
    assert not of(load_spec(tiny(command=given['command'].replace(')', ', eps=1e-8)'))), 'optimizer')

def test_p02_unresolved_reference():
    given,want = case('p02')
    study = load_spec(tiny(references=[dict(id='a', what='b', source='c', revision=None, status=given['status'])]))
    for stage in ('full','decide'):
        with pytest.raises(ValueError, match='unresolved'): study.require_sound(stage)
    for stage in want['allowed']: study.require_sound(stage)

def test_p03_gate_values_as_text():
    given,want = case('p03')
    gate = lambda values: dict(applicable=True, reason='', calibration=None, checks=[dict(metric='executed_group_size_treatment', measures='', min=None, max=None, one_of=values)])
    study = load_spec(tiny(activation_gate=gate(given['one_of'])))
    assert study.gates[0].one_of==want['one_of'] and given['observed'] in study.gates[0].one_of and type(study.gates[0].one_of[0]) is int and of(study, 'text_value')
    with pytest.raises(ValueError, match='is not a number'): load_spec(tiny(activation_gate=gate(['one'])))

def test_p07_another_hash(tmp_path):
    sealed,other = load_spec(tiny()),load_spec(tiny(lora_rank=16))
    seal(sealed, tmp_path)
    with pytest.raises(ValueError) as e: execute(other, 'grpo_gs8', runs_dir=tmp_path)
    assert sealed.sha256 in str(e.value) and other.sha256 in str(e.value) and f'the parent is {sealed.sha256}' in str(e.value)
    assert not list((tmp_path/sealed.name).glob('*/attempt_*'))
    changed = amend(sealed, {'lora_rank':16}, 'half the rank', tmp_path)
    row, = map(json.loads, (tmp_path/sealed.name/'amendments.jsonl').read_text().splitlines())
    assert row['parent']==sealed.sha256 and in_force(sealed, tmp_path).sha256==changed.sha256==other.sha256

def test_p08_over_budget(tmp_path):
    given,want = case('p08')
    hours = projected_hours(given['seconds_per_sequence'], given['sequences_per_step'], given['steps'])
    assert hours==pytest.approx(want['projected_h'], abs=1e-6)
    measured = dict(config=None, effective_config=None, generation=None, primary_endpoint=None, recovery=None, source='probe', measurements=dict(setup_s=0., step_s=given['seconds_per_sequence']*given['sequences_per_step'], eval_s=0.))
    study = load_spec(tiny(feasibility=measured, budget=dict(max_wall_minutes=60.*given['budget_h'], gpu_hours=2.)))
    with pytest.raises(ValueError, match='over_budget'): execute(study, 'grpo_gs8', runs_dir=tmp_path)
    assert over_budget(hours, study.spec.budget).blocks('full') and not list(tmp_path.iterdir()) # before anything is sealed

def test_p10_stock_loss():
    given,want = case('p10')
    study = load_spec(tiny(baseline=given['baseline']))
    f, = of(study, want['code'])
    assert f.mend=='name the loss and the commit'
    with pytest.raises(ValueError, match='name the loss and the commit'): study.require_sound('full')
    assert not of(load_spec(tiny(baseline=given['baseline']+' at 9dfcc3a2cf44432d621a01005073dc6d76a1e87a')), want['code'])

def test_p11_batch_on_one_side():
    given,want = case('p11')
    assert (one_sided([.8, given['max_ratio']], given['cap']) is None)==want['informative']
    assert one_sided([.8, given['max_ratio']], given['cap']).severity=='block' and one_sided([2.1, 2.2], given['cap']) and one_sided([.8, 2.1], given['cap']) is None

def test_s01_half_widths():
    given,want = case('s01')
    got = {f'{arms}arm_{"two" if sides==2 else "one"}': hoeffding_half_width(given['n'], [1]*arms, given['alpha']*(1 if sides==2 else 2)) for arms in given['arms'] for sides in given['sides']}
    assert got==pytest.approx(want, abs=1e-6)

def test_s02_interaction_of_four_arms():
    "Items whose weighted mean is as near as it can be to each mean."
    given,want = case('s02')
    def decide(mean):
        up = right(round(abs(mean)*given['n']), given['n']); down = dict.fromkeys(up, 0)
        arms = dict(a=down, b=up if mean>0 else down, c=down, d=up if mean<0 else down)
        return paired_hoeffding(arms, dict(zip('abcd', given['weights'])), given['margin'], given['alpha']).outcome
    assert [decide(m) for m in given['means']]==want['decisions']

def test_s04_out_of_reach():
    given,want = case('s04')
    raw = copy.deepcopy(load_spec('tailrl_lag').raw)
    raw['decision_rule']['criteria'][0]['plausible_effect'] = given['plausible_effect']
    study = load_spec(raw)
    f, = of(study, 'reach')
    assert f.severity=='warn' and f'{want["must_exceed"]:.6f}' in f.message and 'an effect of 0.05 cannot validate' in f.message
    assert items_needed(.03, given['weights'], given['alpha'])==want['items_for_half_width_03']==int(of(load_spec('tailrl_lag'), 'reach')[0].mend.split()[0])
    r, = reach(study, studies=0)
    assert (r.n, r.margin, r.reachable, r.items_for[.03])==(given['n'], given['margin'], want['reachable'], want['items_for_half_width_03']) and r.must_exceed==pytest.approx(want['must_exceed'], abs=1e-6)

def test_s06_items_that_differ():
    given,want = case('s06')
    with pytest.raises(ValueError, match=re.escape(f'1 items missing {want["missing"]}, 1 extra {want["extra"]}')): paired_values(dict(a=dict.fromkeys(given['ids_a'], 1), b=dict.fromkeys(given['ids_b'], 1)), dict(a=1, b=-1))

def test_s08_an_item_twice():
    given,want = case('s08')
    with pytest.raises(ValueError, match=f'duplicate id {want["duplicate"]}'): items_of([dict(item_id=i, correct=1) for i in given['ids']])

def test_s09_null_and_a_half():
    given,want = case('s09')
    def refused(v):
        try: paired_values(dict(a={1:v}), dict(a=1), given['bounds'], given['metric'])
        except ValueError as e: return str(v) in str(e)
        return False
    assert [v for v in given['values'] if refused(v)]==want['refused']

def test_s11_mcnemar():
    given,want = case('s11')
    assert mcnemar_exact(given['only_a'], given['only_b'])==pytest.approx(want['p'], abs=1e-6)

def test_s13_weights_without_arms():
    given,want = case('s13')
    raw = tiny(roles={})
    for a,name in zip(raw['arms'], given['arms']): a['name'] = name
    raw['decision_rule']['criteria'][0]['weights'] = given['weights']
    study = load_spec(raw)
    for stage in ('preflight','pilot','full'): study.require_sound(stage)
    f, = of(study, 'weights')
    assert f.severity=='block' and f.blocks('decide')
    load_spec(dict(raw, roles=want['roles'])).require_sound('decide')

def test_s14_grey_zone():
    given,want = case('s14')
    raw = load_spec('score_centering').raw
    assert raw['decision_rule']['between']==want['decision'] and (raw['decision_rule']['gap_validates'], raw['decision_rule']['gap_fails'])==(given['validates'], given['fails'])
    f, = of(load_spec(dict(raw, decision_rule=dict(raw['decision_rule'], between=None))), 'grey_zone')
    assert f.blocks('decide') and not f.blocks('full')
    items = dict(t=right(50+round(100*given['gap'])), b=right(50))
    assert threshold_rule(items, {a: {50: v, 100: v} for a,v in items.items()}, 't', 'b', given['validates'], given['fails']).outcome==want['decision']

def test_s16_the_same_seed_twice():
    given,want = case('s16')
    items = dict(a={i: i%2 for i in range(200)}, b={i: int(i%3==0) for i in range(200)})
    first,*again = [secondary(items, dict(a=1, b=-1), seed=given['seed']) for _ in range(given['calls'])]
    assert all((first==x)==want['equal'] for x in again) and secondary(items, dict(a=1, b=-1), seed=8)!=first

def test_s17_a_partial_evaluation(tmp_path):
    given,want = case('s17')
    gsm8k = dict(name='gsm8k', train_split='train', eval_split='test', reward='correct') # it has as many items
    study = load_spec(tiny(task=gsm8k, curve=None, eval=dict(n_examples=given['n'], max_tokens=32, metric='accuracy')))
    for a in study.arms:
        at = open_attempt(study, a.name, tmp_path)
        at.append('rollouts', [dict(step=0)])
        at.append('eval', [dict(item_id=i, correct=1, grader='marker-1') for i in range(given['graded'])])
        at.finish('succeeded', steps=40)
    with pytest.raises(ValueError, match=f'{given["graded"]} of {given["n"]}'): decide(study, tmp_path)
    assert want['decision'] is None and not (tmp_path/study.name/'decision.json').exists()

# The mapping itself

def check_mapping(tests, cases):
    "Every case has one test, and every test a case."
    found = [m[1] for n in tests if (m := re.match(r'test_([a-z]\d\d)_', n))]
    assert sorted(found)==sorted(cases)

def check_source(cases, areas):
    "Where the file of cases is at hand: the same ids, and every figure of a row here stands in the row there."
    path = here.parents[1]/'shared'/'cases'/'cases.jsonl'
    if not path.exists(): pytest.skip(f'no {path}: the file of cases does not ship with the package')
    theirs = {r['id']: r for r in map(json.loads, path.read_text(encoding='utf-8').splitlines()) if r['area'] in areas}
    assert set(cases)==set(theirs) and all(cases[k]['area']==r['area'] for k,r in theirs.items())
    def figures(x):
        if isinstance(x, dict): return [f for v in x.values() for f in figures(v)]
        if isinstance(x, list): return [f for v in x for f in figures(v)]
        return [float(x)] if isinstance(x, (int,float)) and not isinstance(x, bool) else []
    for id,r in theirs.items():
        known = figures(r) + [float(n) for n in re.findall(r'(?<![\w.])\d*\.?\d+(?:e-?\d+)?', json.dumps(r))]
        missing = [f for k in ('given','want') for f in figures(cases[id][k]) if not any(abs(f-x)<=1e-9 for x in known)]
        assert not missing, (id, missing)

def test_every_case_has_one_test(): assert len(CASES)==18; check_mapping(globals(), CASES)
def test_the_cases_are_those_of_the_file(): check_source(CASES, AREAS)
