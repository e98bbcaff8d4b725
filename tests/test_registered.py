"The three registered studies as they stand, and the packaged specs that carry them."
import copy, json
from collections import Counter
from pathlib import Path
import pytest
from rxnb.advantages import estimator
from rxnb.fields import Spec
from rxnb.losses import loss_params
from rxnb.spec import load_spec, sha256_of, spec_names

shared = Path(__file__).parents[2]/'shared'
NAMES = ('gs1_kernel','tailrl_lag','score_centering')

def registered(name):
    path = shared/'specs'/f'{name}.json'
    if not path.exists(): pytest.skip(f'no {path}: the registered files do not ship with the package')
    raw = json.loads(path.read_text())
    return path, raw.get('spec', raw), raw

def leaves(x, path=''):
    "Every scalar of an object with its path."
    if isinstance(x, dict):
        for k,v in x.items(): yield from leaves(v, f'{path}.{k}')
    elif isinstance(x, list):
        for v in x: yield from leaves(v, path)
    elif x is not None: yield path,x

def blocking(study, stage): return [f.code for f in study.findings if f.blocks(stage)]
def of(study, code): return [f for f in study.findings if f.code==code]

@pytest.mark.parametrize('name', NAMES)
def test_every_figure_is_carried(name):
    "Each number, truth value and sentence of the file stands somewhere in the translation."
    path,inner,_ = registered(name)
    study = load_spec(path)
    mine = list(leaves(study.spec.model_dump()))
    words = '\n'.join(v for _,v in mine if isinstance(v, str))
    numbers = {float(v) for _,v in mine if isinstance(v, (int,float)) and not isinstance(v, bool)}
    for where,v in leaves(inner):
        if isinstance(v, bool): continue # parts with truth values are compared below
        if isinstance(v, (int,float)): assert float(v) in numbers or str(v) in words, (where, v)
        elif 'one_of' in where and v.isdigit(): assert float(v) in numbers
        else: assert v in words or v in ('group_mean','kernel_cross_prompt_baseline','grpo') or v.split('/')[-1] in words, (where, v)
    for part in ('experiment_features','preflight','generation_audit','budget','correctness_preflight'):
        if part in inner: assert getattr(study.spec, part).model_dump()=={**{k: None for k in type(getattr(study.spec, part)).model_fields}, **inner[part]}

@pytest.mark.parametrize('name', NAMES)
def test_wrapped_bare_and_reloaded_are_one_study(name):
    path,inner,raw = registered(name)
    study = load_spec(path)
    bare,wrapped = load_spec(inner),load_spec(dict(title='outer', summary='in short', spec=inner))
    assert study.name==name and study.spec.source.sha256==sha256_of(inner)==bare.spec.source.sha256
    assert bare.arms==wrapped.arms==study.arms and bare.decision_rule==study.decision_rule
    assert (wrapped.spec.summary, wrapped.spec.source.title)==('in short','outer')
    assert load_spec(study.raw).sha256==study.sha256 and load_spec(study.raw).spec==study.spec
    assert of(bare, 'name') and not of(study, 'name')

@pytest.mark.parametrize('where', ['','arms.0','dataset','eval','optimizer','activation_gate','activation_gate.checks.0','decision_rule','correctness_preflight','restoration_preflight','budget','preflight'])
def test_unknown_keys_are_refused_everywhere(where):
    _,inner,_ = registered('gs1_kernel')
    raw = copy.deepcopy(inner)
    at = raw
    for k in where.split('.') if where else (): at = at[int(k) if k.isdigit() else k]
    key = next(iter(at))
    at[key+'x'] = 1
    with pytest.raises(ValueError, match=f"unknown key '{key}x'; did you mean '{key}'"): load_spec(raw)

def test_s3_as_registered():
    study = load_spec(registered('gs1_kernel')[0])
    assert [a.name for a in study.arms]==['grpo_gs8','gs1_kernel'] and len(study.gates)==6
    assert study.arm('gs1_kernel').advantage.params==dict(window=256, bandwidth=.5, min_mass=1e-3)
    assert study.gates[0].one_of==[1] and study.gates[1].one_of==[8] and len(of(study, 'text_value'))==2
    assert study.spec.activation_gate.calibration.model_dump()==dict(metric='kernel_effective_neighbors_p10', parameter='arms.gs1_kernel.advantage.params.bandwidth', values=[.5,1.], max_pilot_steps=2, max_wall_minutes=10.)
    assert {'weights','optimizer','unresolved_reference','stock_loss','unstated'}<=set(blocking(study, 'decide'))
    assert 'weights' not in blocking(study, 'full') and 'unresolved_reference' not in blocking(study, 'pilot')
    assert {f.message.split(' ')[0] for f in of(study, 'unstated')}=={'prompt','grader','optimizer.weight_decay','optimizer.grad_clip_norm','sampling.top_p','sampling.top_k','eval.max_tokens'}
    assert '0.044789' in of(study, 'reach')[0].message and of(study, 'coverage') and of(study, 'n_examples')

def test_s1_as_registered():
    study = load_spec(registered('tailrl_lag')[0])
    assert [(a.advantage.name, a.lag.updates, a.loss.params) for a in study.arms]==[('group_mean',0,{'cap':2.}), ('group_mean',4,{'cap':2.}), ('tailrl',0,{'cap':2.}), ('tailrl',4,{'cap':2.})]
    assert {'gate_steps','calibration_lag','tailrl_binary','truncated_masks','n_examples','reach','not_measured'}<={f.code for f in study.findings if f.severity=='warn'}
    assert of(study, 'gate_steps')[0].message.startswith('kl_behavior_current_ratio_lag4_over_lag0 is checked on steps 4 to 8; the pilot of 8')
    assert '0.179579' in of(study, 'reach')[0].message and '32791' in of(study, 'reach')[0].mend
    assert study.spec.activation_gate.calibration.values==[4,8] and 'weights' not in blocking(study, 'decide')

def test_s2_as_registered():
    study = load_spec(registered('score_centering')[0])
    baseline,treatment = study.arms
    assert baseline.loss.name=='importance_sampling' and treatment.loss.params==dict(auxiliary='top20', k=8, correction='none')
    assert all((a.lag.kind, a.lag.updates, a.group_size, a.groups_per_batch, a.lr, a.seed)==('refresh', 4, 8, 16, 4e-5, None) for a in study.arms)
    rule = study.decision_rule
    assert (rule.gap_validates, rule.gap_fails, rule.collapse_drop, rule.checkpoints, rule.between)==(.04, .02, .1, [25,50,75,100], None)
    assert of(study, 'grey_zone')[0].blocks('decide') and {'eval_subset','n_examples','reach','auxiliary_top20'}<={f.code for f in study.findings}

def test_what_mends_s3():
    "The registered file with what it lacks, in the project's fields: nothing blocks."
    _,inner,_ = registered('gs1_kernel')
    mine = load_spec('gs1_kernel').raw
    raw = dict(copy.deepcopy(inner), **{k: mine[k] for k in ('roles','prompt','grader','sampling','references')}, command=inner['command'].replace('learning_rate=4e-5', 'learning_rate=4e-5, beta1=.9, beta2=.95, eps=1e-8, weight_decay=0, grad_clip_norm=0'))
    raw['optimizer'].update(weight_decay=0., grad_clip_norm=0.); raw['eval']['max_tokens'] = 512
    for p in raw['correctness_preflight']['paths']: p.update(baseline_revision='cookbook', reference_revision='kernel_plain')
    study = load_spec(raw)
    assert [blocking(study, s) for s in ('preflight','pilot','full','decide')]==[[]]*4

@pytest.mark.parametrize('name', NAMES)
def test_the_packaged_spec_carries_the_registered_figures(name):
    path,inner,_ = registered(name)
    theirs,mine = load_spec(path).spec,load_spec(name).spec
    assert mine.source.sha256==sha256_of(inner)
    for k in ('base_model','batch_size','steps','lora_rank','max_seq_len','budget','task','experiment_features','generation_audit','feasibility_required','primary_endpoint'):
        if name!='score_centering' or k!='experiment_features': assert getattr(mine, k)==getattr(theirs, k), k
    assert mine.tags==(json.loads(path.read_text()).get('tags') or [])
    assert (mine.dataset.n_examples, mine.dataset.hf_path, mine.dataset.split)==(theirs.dataset.n_examples, theirs.dataset.hf_path, theirs.dataset.split) and mine.dataset.counts=='rollouts'
    assert mine.eval.n_examples==theirs.eval.n_examples and mine.sampling.max_tokens==theirs.sampling.max_tokens and theirs.pilot_steps in (None, mine.pilot_steps)
    same = lambda a: (a.advantage.name, {k: v for k,v in a.advantage.params.items() if k!='scale_by_group'}, a.loss.name, a.loss.params, a.lag, a.group_size, a.groups_per_batch, a.lr)
    assert [same(a) for a in mine.arms if not a.control]==[same(a) for a in theirs.arms]
    for k,v in theirs.optimizer: assert v in (None, getattr(mine.optimizer, k))
    if theirs.activation_gate:
        limits = lambda s: [(c.metric, c.min, c.max, c.one_of) for c in s.activation_gate.checks]
        assert limits(mine)==limits(theirs) and mine.activation_gate.calibration==theirs.activation_gate.calibration
    if theirs.correctness_preflight: assert [(p.id, p.kind, p.tolerances) for p in mine.correctness_preflight.paths]==[(p.id, p.kind, p.tolerances) for p in theirs.correctness_preflight.paths]
    if theirs.restoration_preflight:
        for a,b in zip(mine.restoration_preflight.groups[0].arms, theirs.restoration_preflight.groups[0].arms, strict=True):
            assert a.name==b.name and all(v in (None, getattr(a.optimizer_config, k)) for k,v in b.optimizer_config)
    if theirs.feasibility: assert (mine.feasibility.effective_config, mine.feasibility.primary_endpoint)==(theirs.feasibility.effective_config, theirs.feasibility.primary_endpoint)
    rule = lambda s: s.decision_rule.model_dump(exclude={'estimand','seeds','between','treatment','baseline'})
    assert rule(mine)==rule(theirs)

@pytest.mark.parametrize('name', spec_names())
def test_packaged_specs_are_explicit_and_sound(name):
    "Every field stated, nothing blocking, every method and parameter known; a field that came after these were registered would change their hash."
    study,later = load_spec(name),{'warm_start','weights'}
    assert set(study.raw)|later==set(Spec.model_fields) and all('control' in a for a in study.raw['arms'])
    assert [blocking(study, s) for s in ('preflight','pilot','full','decide')]==[[]]*4
    for a in study.arms:
        loss_params(a.loss.name, **a.loss.params)
        estimator(a.advantage.name, **a.advantage.params)

def test_the_controls():
    lag = load_spec('tailrl_lag')
    assert Counter((a.advantage.name, a.loss.name) for a in lag.arms)==Counter({('group_mean','truncated'):7, ('group_mean','tis'):7, ('tailrl','truncated'):7, ('tailrl','tis'):7})
    assert sorted({a.lag.updates for a in lag.arms})==[0,1,2,4,8,16,64]
    assert [a.name for a in lag.arms if not a.control]==['grpo_lag0','grpo_lag4','tailrl_lag0','tailrl_lag4']
    losses = {a.name: (a.loss.name, a.loss.params.get('correction')) for a in load_spec('score_centering').arms}
    assert {losses[k] for k in ('reinforce','tis','centered','centered_tis')}=={('reinforce',None), ('tis',None), ('centered_mc','none'), ('centered_mc','tis')}
    assert [a.name for a in load_spec('gs1_kernel').arms if a.control]==['gs1_batchmean']

def test_pins_of_files_of_this_repository():
    "A reference with a sha256 is the file as it is now."
    import hashlib
    root = Path(__file__).parents[1]
    own = [r for n in spec_names() for r in load_spec(n).spec.references if (root/r.source).is_file()]
    assert own
    for r in own: assert hashlib.sha256((root/r.source).read_bytes()).hexdigest()==r.revision, f'{r.source} was changed: look at it, and pin it again'
