"Cases of what may happen to a run, to its lag, to what samples and to its notebooks: `cases.json` says each in words and figures, and has one test here."
import ast, json, os, re
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from types import SimpleNamespace as NS
os.environ['OMP_NUM_THREADS'] = '1'; os.environ['TINKER_TELEMETRY'] = '0'
import httpx, nbformat, numpy as np, papermill, pytest, tinker, torch
from tinker import types
import crash_child, test_notebooks, rxnb.evaluate, rxnb.records, rxnb.resume, rxnb.study, rxnb.train
from test_cases import check_mapping, check_source, of_areas
from test_crash import cut, finish, outcome, said
from wire_flow import ADAM, PROMPT, now, params, seqs, text
from rxnb.connect import connect, embedded, log, waiting
from rxnb.engine import Engine
from rxnb.evaluate import flips, greedy_rows
from rxnb.fields import Prompt
from rxnb.gates import Evidence, Pilot, executed_lag, standing
from rxnb.lag import Refresh, SamplerRing
from rxnb.preflight import check_samplers, pinned_line
from rxnb.records import attempts, completed, open_attempt, read_rows
from rxnb.report import report
from rxnb.resume import Keeper, LostCheckpoint, State, last_state, must_outlive, reopen
from rxnb.rollouts import make_rollouts, token_columns
from rxnb.serve import App, Backend, Server, packaged_models
from rxnb.spec import load_spec, spec_names
from rxnb.status import read_status
from rxnb.study import decide, evaluate_again, execute, notebook, only_declared, regrade, run_arm
from rxnb.tasks import Problem, load_task, render, require_prompts
from rxnb.train import Samplers, begin, prepare, submit_loss

torch.set_num_threads(1)
AREAS = ('lag','run','resume','sampler','notebook')
CASES = of_areas(*AREAS)

def case(id): return CASES[id]['given'],CASES[id]['want']

def tiny(name='gs1_tiny', steps=4, arms=None, **changes):
    "A tiny study cut to a few steps of sixteen short rollouts and five items."
    raw = cut(name) | dict(steps=steps, curve=None) | changes
    raw['sampling'] = dict(raw['sampling'], max_tokens=12)
    raw['arms'] = [a for a in raw['arms'] if arms is None or a['name'] in arms]
    if len(raw['arms'])<2: raw.update(decision_rule=None, roles={})
    return raw

def steps_of(study, arm, runs, stage='full', nth=-1): return read_rows(attempts(study, arm, runs, stage)[nth][0]/'steps.jsonl')

def stop_after(monkeypatch, n):
    "The arm dies after so many steps, before it saves."
    def die(): raise RuntimeError('on purpose')
    monkeypatch.setattr(rxnb.study, 'progress_line', rxnb.study.progress_line)
    crash_child.before(rxnb.study, 'progress_line', crash_child.at(n, die))

def stopped(monkeypatch, study, arm, runs, n, every=2):
    "An attempt that died after n steps."
    with monkeypatch.context() as m:
        stop_after(m, n)
        with pytest.raises(RuntimeError, match='on purpose'): execute(study, arm, runs_dir=runs, save_every=every)

@pytest.fixture(scope='module')
def engine(): return Engine(packaged_models()['tiny_arith'], device='cpu')

@pytest.fixture(scope='module')
def service(): return connect(base_model='tiny_arith')

@pytest.fixture(scope='module')
def pair(tmp_path_factory):
    "A study of two arms that are complete."
    runs,study = tmp_path_factory.mktemp('pair'),load_spec(tiny(arms=('grpo_gs8','gs1_kernel')))
    for a in study.arms: execute(study, a.name, runs_dir=runs)
    return study,runs

def learner(service): return now(service.create_lora_training_client(base_model='tiny_arith', rank=2, seed=0))

DATA = [types.Datum(model_input=text(range(10, 20)), loss_fn_inputs=dict(target_tokens=np.arange(11, 21), weights=np.ones(10, np.float32)))]
def learn(client): client.forward_backward(DATA, 'cross_entropy').result(); client.optim_step(ADAM).result()
def logps(client): return client.forward(DATA, 'cross_entropy').result().loss_fn_outputs[0]['logprobs'].tolist()

# Lag

def drive(ring, steps):
    "Versions that sampled, as the loop asks for them: every step updates the weights."
    out = []
    ring.push(0, 'v0')
    for version in range(steps):
        out.append(ring.sampler_for(version)[0])
        ring.push(version+1, f'v{version+1}')
    return out

def test_v01_fixed_lag():
    given,want = case('v01')
    sampled = drive(SamplerRing(given['lag']), given['steps'])
    lags = [t-v for t,v in enumerate(sampled)]
    assert sampled==want['sampler_version'] and lags==want['executed_lag']
    seen = executed_lag([dict(step=t, version=t, lag=l) for t,l in enumerate(lags)], given['lag'])
    assert seen.value==[given['lag']] and f'steps {want["covered_from"]} to 9' in seen.what

def test_v02_sawtooth():
    given,want = case('v02')
    lags = [t-v for t,v in enumerate(drive(Refresh(given['refresh_every']), given['steps']))]
    assert lags==want['executed_lag'] and (np.mean(lags), max(lags))==(want['mean'], want['max'])
    assert lags!=[t-v for t,v in enumerate(drive(SamplerRing(given['refresh_every']), given['steps']))]
    rows = [dict(step=t, version=t, lag=l) for t,l in enumerate(lags)]
    assert executed_lag(rows, given['refresh_every']).value!=[given['refresh_every']] # the gate of a fixed lag does not take it

def test_v04_a_version_is_an_update(tmp_path, monkeypatch):
    given,want = case('v04')
    calls = []
    for name in ('save_weights_for_sampler','save_state','optim_step'):
        monkeypatch.setattr(tinker.TrainingClient, name, getattr(tinker.TrainingClient, name))
        crash_child.before(tinker.TrainingClient, name, lambda name=name: calls.append(name))
    result = execute(load_spec(tiny(pilot_steps=1)), 'gs1_kernel', 'pilot', runs_dir=tmp_path)
    assert sum(c!='optim_step' for c in calls)==given['save_calls'] and calls.count('optim_step')==given['optim_steps']
    assert result['version']==want['version']

def test_v06_the_oldest_version_decides(service):
    given,want = case('v06')
    ring = SamplerRing(want['lag'])
    for v in range(given['trained_at']+1): ring.push(v, f'v{v}')
    assert ring.sampler_for(given['trained_at'])[0]==given['oldest']
    tc = learner(service)
    old = now(service.create_sampling_client(model_path=tc.save_weights_for_sampler(f'case-v{given["oldest"]}').result().path))
    alone = seqs(old.sample(text(PROMPT), 4, params(24, seed=1)).result())
    under_way = [old.sample(text(PROMPT), 4, params(24, seed=1)) for _ in range(4)]
    for _ in range(2): learn(tc)
    tc.save_weights_for_sampler(f'case-v{given["newest"]}').result()
    assert all(seqs(f.result())==alone for f in under_way) # no token of a newer version in them

def test_v08_capacity_after_a_restore():
    given,want = case('v08')
    ring = SamplerRing(given['max_lag'])
    for v in range(given['version']-given['max_lag'], given['version']+1): ring.push(v, f'v{v}') # as `restore` does
    samplers = Samplers(NS(create_sampling_client=lambda model_path: NS(path=model_path)), ring)
    ready = [v for v in range(given['version'], given['version']+given['version']) if samplers.at(v)]
    assert len(ready)*given['batch']==want['capacity']!=want['not_capacity']

def test_v10_a_sampler_expires_too_early(tmp_path, monkeypatch):
    given,want = case('v10')
    step_s = 60*given['step_minutes']
    with pytest.raises(ValueError, match=rf'\({given["lag"]}\+1\) x {step_s} s = {want["needed_s"]} s, and expires after {given["ttl_s"]} s'): must_outlive(given['lag'], step_s, given['ttl_s'])
    must_outlive(given['lag'], step_s, want['needed_s'])
    study,real = load_spec(tiny('tailrl_tiny')),rxnb.resume.expiries
    monkeypatch.setattr(rxnb.resume, 'expiries', lambda *a: {p: (datetime.now(timezone.utc)+timedelta(seconds=.1)).isoformat() for p in real(*a)})
    with pytest.raises(ValueError, match=r'a sampler must live \(4\+1\) x'): execute(study, 'grpo_lag4', runs_dir=tmp_path, save_every=10)
    assert len(steps_of(study, 'grpo_lag4', tmp_path))==1 # and not when it is gone

def test_v11_the_ring_of_a_resumed_run(tmp_path, monkeypatch):
    given,want = case('v11')
    study = load_spec(tiny('tailrl_tiny', steps=20))
    before,after,empty = (prepare(study, 'grpo_lag4') for _ in range(3))
    for v in range(given['resume_at_step']+1): before.samplers.push(v, f'tinker://r/sampler_weights/v{v}')
    monkeypatch.setattr(rxnb.resume, 'expiries', lambda *a: {}); monkeypatch.setattr(rxnb.resume, 'ask_removal', lambda *a: [])
    keeper = Keeper(None, NS(save_state=lambda name: NS(result=lambda: NS(path='tinker://r/weights/s'))), NS(path=tmp_path), 'name')
    keeper.save(before, given['resume_at_step'], given['resume_at_step'], before.samplers.paths[given['resume_at_step']], None)
    state = State(**json.loads((tmp_path/'state.json').read_text()))
    version,_ = begin(after, keeper, state)
    assert list(after.samplers.paths)==want['ring'] and after.samplers.sampler_for(version)==(want['ring'][0], 'tinker://r/sampler_weights/v8')
    begin(empty, keeper, replace(state, samplers=[]))
    with pytest.raises(ValueError, match='no sampler of version 8'): empty.samplers.sampler_for(version)

def test_v12_the_wrong_kind_of_checkpoint(service):
    given,want = case('v12')
    with pytest.raises(ValueError, match=want['named']): SamplerRing(0).push(0, given['path'])
    path = learner(service).save_state('s3').result().path
    with pytest.raises(tinker.BadRequestError, match='save_weights_for_sampler'): now(service.create_sampling_client(model_path=path)).get_base_model()

def test_v13_one_update_a_batch(tmp_path):
    given,_ = case('v13')
    for place in ([], ['arms',0], ['optimizer'], ['arms',0,'lag'], ['arms',0,'loss']):
        raw = tiny('tailrl_tiny')
        part = raw
        for k in place: part = part[k]
        part['optimizer_steps_per_batch'] = given['optimizer_steps_per_batch']
        with pytest.raises(ValueError, match='optimizer_steps_per_batch'): load_spec(raw)
    study = load_spec(tiny('tailrl_tiny')); execute(study, 'grpo_lag4', 'pilot', runs_dir=tmp_path)
    rows = steps_of(study, 'grpo_lag4', tmp_path, 'pilot')
    assert [r['version'] for r in rows]==list(np.cumsum([0]+[not r['skipped'] for r in rows])[:-1]) # at most one update a step

# Run

class Limited:
    "A server that answers 429 with these waits to the first requests of a route, and keeps the bodies of all of them."
    def __init__(self, app, route, waits, status=429): self.app,self.route,self.waits,self.status,self.seen,self.bodies = app, route, list(waits), status, [], []
    async def __call__(self, scope, receive, send):
        if not scope['path'].endswith('/'+self.route): return await self.app(scope, receive, send)
        body,more = b'',True
        while more: m = await receive(); body += m.get('body', b''); more = m.get('more_body')
        self.bodies.append(body)
        self.seen.append(self.status if self.waits else 200)
        if self.waits:
            head = [(b'content-type', b'application/json'), (b'retry-after', str(self.waits.pop(0)).encode())]
            await send(dict(type='http.response.start', status=self.status, headers=head)); return await send(dict(type='http.response.body', body=b'{"detail": "on purpose"}'))
        told = [dict(type='http.request', body=body, more_body=False)]
        async def again(): return told.pop() if told else await receive()
        return await self.app(scope, again, send)
    def close(self): self.app.close()
    def __getattr__(self, k): return getattr(self.app, k)

def test_r01_a_rate_limit_is_waited_for(engine, caplog):
    given,want = case('r01')
    with Server(Limited(App([Backend('tiny_arith', engine)]), 'optim_step', given['retry_after_s'])) as s:
        sc = connect(s.base_url, 'tiny_arith'); tc = learner(sc)
        with caplog.at_level('WARNING', log.name): learn(tc)
        assert s.app.seen==given['http'] and len(set(s.app.bodies))==1 and s.app.models[tc.model_id].lora.step==1
        lines = [r.getMessage() for r in caplog.records if r.name==log.name]
        assert 'waiting for the endpoint: HTTP 429 on optim_step' in lines[0] and f'{want["tries"]} tries' in lines[-1] and waiting.since is None
        sc.close('success').result()

def test_r02_sent_again(service):
    _,want = case('r02')
    server = embedded('tiny_arith'); tc = learner(service)
    tc.forward_backward(DATA, 'cross_entropy').result() # its number is 1
    post = lambda eps: httpx.post(f'{server.base_url}/api/v1/optim_step', json=dict(model_id=tc.model_id, seq_id=2, adam_params=dict(ADAM.model_dump(), eps=eps)))
    first,second = post(1e-8),post(1e-8)
    assert first.status_code==second.status_code==200 and first.json()==second.json()
    assert httpx.post(f'{server.base_url}/api/v1/retrieve_future', json=dict(request_id=second.json()['request_id']), timeout=60).json()['metrics']
    assert server.app.models[tc.model_id].lora.step==want['updates'] and post(1.).status_code==want['status']

def test_r03_a_loss_that_is_no_number(tmp_path, monkeypatch):
    given,want = case('r03')
    raw,updates = tiny(steps=given['step']+1, batch_size=8, arms=('grpo_gs8',)),[]
    raw['arms'][0]['groups_per_batch'] = 1; raw['sampling']['max_tokens'] = 4; study = load_spec(raw)
    def bad(*a):
        future = submit_loss(*a)
        class Sent:
            def result(self):
                out = future.result()
                if len(steps_of(study, 'grpo_gs8', tmp_path))==given['step']: out.metrics['loss:sum'] = np.nan
                return out
        return Sent() if list(tmp_path.glob('*/*/*/steps.jsonl')) else future
    monkeypatch.setattr(rxnb.train, 'submit_loss', bad)
    monkeypatch.setattr(tinker.TrainingClient, 'optim_step', tinker.TrainingClient.optim_step)
    crash_child.before(tinker.TrainingClient, 'optim_step', lambda: updates.append(len(list(tmp_path.glob('*/*/*/steps.jsonl'))) and len(steps_of(study, 'grpo_gs8', tmp_path))))
    # every group has something to teach, so that each step reaches its loss
    judge = rxnb.train.judge_step
    monkeypatch.setattr(rxnb.train, 'judge_step', lambda recipe, rollouts, critic=None: judge(recipe, [replace(r, reward=float(i%2)) for i,r in enumerate(rollouts)], critic))
    with pytest.raises(FloatingPointError): execute(study, 'grpo_gs8', runs_dir=tmp_path)
    result = attempts(study, 'grpo_gs8', tmp_path)[0][2]
    assert (result['status'], result['cause'], result['step'])==('failed', 'FloatingPointError', given['step']) and 'non-finite loss' in result['message']
    assert len(steps_of(study, 'grpo_gs8', tmp_path))==want['rows'] and updates==list(range(want['rows'])) # the optimizer has not stepped in that step
    said = read_status(study, tmp_path)['arms']['grpo_gs8']
    assert said['state']=='failed' and said['step']==given['step'] and 'non-finite loss' in said['cause']

def test_r06_rows_of_another_spec(tmp_path):
    one,two = load_spec(tiny()),load_spec(dict(tiny(), lora_rank=4))
    at = open_attempt(one, 'gs1_kernel', tmp_path); at.append('steps', [dict(step=0)]); at.finish('failed', cause='on purpose')
    before = {f: f.read_bytes() for f in tmp_path.rglob('*.jsonl')}
    for refused in (lambda: execute(two, 'gs1_kernel', runs_dir=tmp_path), lambda: completed(two, 'gs1_kernel', tmp_path), lambda: open_attempt(two, 'gs1_kernel', tmp_path)):
        with pytest.raises(ValueError) as e: refused()
        assert one.sha256[:12] in str(e.value) and two.sha256[:12] in str(e.value)
    assert before=={f: f.read_bytes() for f in tmp_path.rglob('*.jsonl')} and len(list(tmp_path.glob('*/*/attempt_*')))==1

def test_r07_every_completion_hits_the_limit():
    given,want = case('r07')
    pilot = lambda frac: Pilot(None, [dict(rollouts=8, truncated_frac=frac, reward_mean=given['reward_mean'])], [], {}, 'a/pilot_1')
    gate = lambda frac: standing(Evidence({}, dict(a=pilot(frac))))[0]
    assert gate(given['truncated_frac']).passed==want['passed'] and 'every completion hits the limit' in gate(given['truncated_frac']).reason and gate(.9).passed

def test_r09_a_poisoned_client(tmp_path, monkeypatch):
    study,clients = load_spec(tiny('tailrl_tiny', arms=('grpo_lag4',))),[]
    with monkeypatch.context() as m:
        for name in ('torch_loss','submit_loss','uploaded'): m.setattr(rxnb.train, name, getattr(rxnb.train, name))
        crash_child.poison(3)
        real = rxnb.train.submit_loss
        m.setattr(rxnb.train, 'submit_loss', lambda client, *a: clients.append(client) or real(client, *a))
        with pytest.raises(Exception): execute(study, 'grpo_lag4', runs_dir=tmp_path, save_every=1)
    with pytest.raises(Exception): clients[-1].forward_backward(DATA, 'cross_entropy').result(timeout=60)
    assert len(clients)==3 # it did not try that client again
    assert execute(study, 'grpo_lag4', runs_dir=tmp_path, save_every=1)['status']=='succeeded'
    (_,first,failed),(_,second,_) = attempts(study, 'grpo_lag4', tmp_path)
    assert failed['status']=='failed' and first['endpoint']['model_id']!=second['endpoint']['model_id'] and second['continues']['step']==failed['step']>=2

def test_r10_prompts_run_out(monkeypatch):
    given,_ = case('r10')
    needed = given['batch']*given['steps']
    with pytest.raises(ValueError, match=f'{needed}'): require_prompts(given['prompts'], given['steps'], given['batch'])
    raw = tiny(steps=given['steps'], arms=('grpo_gs8',), batch_size=32); raw['arms'][0]['groups_per_batch'] = given['batch']
    monkeypatch.setattr(rxnb.train, 'load_task', lambda *a: load_task(*a)[:given['prompts']])
    with pytest.raises(ValueError, match='prompts'): prepare(load_spec(raw), 'grpo_gs8')
    monkeypatch.setattr(rxnb.train, 'load_task', lambda *a: load_task(*a)[:needed])
    prepare(load_spec(raw), 'grpo_gs8')

# Resume

def test_z01_killed_and_gone_on(tmp_path):
    given,want = case('z01')
    raw,arm = tiny(steps=14, batch_size=8, arms=('grpo_gs8','gs1_kernel')),'gs1_kernel'
    for a in raw['arms']: a['groups_per_batch'] = 8//a['group_size']
    runs,whole = tmp_path/'a'/'runs',tmp_path/'b'/'runs'
    for r in (runs, whole): r.mkdir(parents=True)
    assert finish(runs, raw, arm, 'step', given['crash_after_step'], given['every'])==-9, said(runs)
    study = load_spec(raw)
    assert len(steps_of(study, arm, runs))==given['crash_after_step'] and last_state(study, arm, runs)[1].step==want['restart_step']
    assert finish(runs, raw, arm, every=given['every'])==0 and finish(whole, raw, arm, every=given['every'])==0, said(runs)
    first,second = (p for p,_,_ in attempts(study, arm, runs))
    assert [r['step'] for r in read_rows(first/'steps.jsonl')]==list(range(given['crash_after_step'])) # the later rows stay there
    times = [r['time_s'] for r in read_rows(second/'steps.jsonl')]
    assert times[:want['restart_step']]==[r['time_s'] for r in read_rows(first/'steps.jsonl')][:want['restart_step']] and len(times)==14 # ten rows came along, four are new
    assert outcome(runs, raw, arm)==outcome(whole, raw, arm) # prompts, rollouts, weights and items among it

def test_z02_weights_without_moments(service, tmp_path):
    tc = learner(service); learn(tc)
    training,sampler = tc.save_state('with').result().path, tc.save_weights_for_sampler('without').result().path
    state = State(1, 1, sampler, [[1,sampler]], training, None, {})
    again,bare = reopen(service, tmp_path, replace(state, newest=sampler)), now(service.create_training_client_from_state(training))
    assert logps(again)==logps(bare)==logps(tc)
    for c in (tc, again, bare): learn(c)
    assert logps(again)==logps(tc)!=logps(bare) # the moments came along
    with pytest.raises(LostCheckpoint, match='without'): reopen(service, tmp_path, replace(state, training=sampler))

def test_z04_a_checkpoint_is_absent(tmp_path, monkeypatch):
    study,arm = load_spec(tiny(arms=('grpo_gs8',))),'grpo_gs8'
    stopped(monkeypatch, study, arm, tmp_path, 3)
    training = last_state(study, arm, tmp_path)[1].training
    embedded('tiny_arith').app.store.delete(training)
    with pytest.raises(LostCheckpoint, match=re.escape(training)): execute(study, arm, runs_dir=tmp_path)
    assert len(attempts(study, arm, tmp_path))==1

def test_z06_two_graders(tmp_path, monkeypatch):
    study,arm = load_spec(tiny(steps=2, arms=('grpo_gs8',))),'grpo_gs8'
    monkeypatch.setattr(rxnb.evaluate, 'IN_FLIGHT', 1)
    with monkeypatch.context() as m:
        m.setattr(rxnb.records.Attempt, 'append', rxnb.records.Attempt.append)
        real,n = rxnb.records.Attempt.append,[]
        def append(self, name, rows):
            real(self, name, [dict(r, grader='marker-0') for r in rows] if name=='eval' else rows)
            if name=='eval' and n.append(1) is None and len(n)==3: raise RuntimeError('on purpose')
        m.setattr(rxnb.records.Attempt, 'append', append)
        with pytest.raises(RuntimeError, match='on purpose'): execute(study, arm, runs_dir=tmp_path)
    with pytest.raises(ValueError, match='are not mixed with items graded by marker-1') as e: execute(study, arm, runs_dir=tmp_path)
    folder = attempts(study, arm, tmp_path)[-1][0]
    assert f'rxnb.study.regrade({str(folder)!r}' in str(e.value)
    texts = [r['text'] for r in read_rows(folder/'eval.jsonl')]
    new = regrade(folder, study.spec.grader)
    assert {r['grader'] for r in new}=={'marker-1'} and [r['text'] for r in new]==texts and {r['grader'] for r in read_rows(folder/'eval.marker-0.jsonl')}=={'marker-0'}
    result = execute(study, arm, runs_dir=tmp_path)
    rows = read_rows(completed(study, arm, tmp_path)[0]/'eval.jsonl')
    assert result['eval']['n']==5 and {r['grader'] for r in rows}=={'marker-1'} and [r['text'] for r in rows][:3]==texts

def test_z07_no_steps_left(tmp_path, monkeypatch):
    _,want = case('z07')
    raw,arm,calls = tiny(batch_size=8, arms=('grpo_gs8',)),'grpo_gs8',[]
    raw['arms'][0]['groups_per_batch'] = 1; study = load_spec(raw)
    monkeypatch.setattr(rxnb.train, 'learn_step', rxnb.train.learn_step)
    crash_child.before(rxnb.train, 'learn_step', lambda: calls.append(1))
    stopped(monkeypatch, study, arm, tmp_path, 3)
    assert len(calls)==3
    with monkeypatch.context() as m:
        m.setattr(rxnb.study, '_evaluate', lambda *a: (_ for _ in ()).throw(RuntimeError('on purpose')))
        with pytest.raises(RuntimeError, match='on purpose'): execute(study, arm, runs_dir=tmp_path, save_every=2)
    assert len(calls)==5 and last_state(study, arm, tmp_path)[1].step==4 # two steps were left, and made
    result = execute(study, arm, runs_dir=tmp_path, save_every=2)
    assert len(calls)-5==want['steps_left'] and result['status']=='succeeded' and result['steps']==4
    before = {f: f.stat().st_mtime_ns for f in tmp_path.rglob('*') if f.is_file() and '.lock' not in f.name}
    assert execute(study, arm, runs_dir=tmp_path)==result and len(calls)==5
    assert before=={f: f.stat().st_mtime_ns for f in tmp_path.rglob('*') if f.is_file() and '.lock' not in f.name}

# Sampler

class Words:
    "A tokenizer whose text gives other tokens when it is read again."
    def decode(self, tokens, skip_special_tokens=True): return '#### 7' if list(tokens)!=[5,67] else 'other'
    def encode(self, text): return [5,67]
    __call__ = encode

def answered(*sequences): return NS(sequences=[NS(tokens=t, logprobs=[-.5]*len(t), stop_reason=r) for t,r in sequences], prompt_logprobs=None)
def rolled(response, asked): return make_rollouts(response, Problem('p', 'q', '7'), [1,2], Words(), asked, False, 'marker', 'correct')

def test_q01_the_end_of_text_token():
    given,want = case('q01')
    tokenizer = learner(connect(base_model='tiny_arith')).get_tokenizer()
    tokens = [*tokenizer('#### 7', add_special_tokens=False).input_ids, tokenizer.eos_token_id]
    r, = make_rollouts(answered((tokens, given['stop_reason'])), Problem('p', 'q', '7'), [1,2], tokenizer, 1, False, 'marker', 'correct')
    assert (r.stop_reason=='length')==want['truncated'] and r.grade.correct==want['graded'] and r.reward==1. and r.tokens[-1]==tokenizer.eos_token_id # and it is trained on

def test_q02_tokens_are_never_made_again():
    given,want = case('q02')
    r, = rolled(answered((given['tokens'], 'stop')), 1)
    assert Words().encode(r.text)==given['text_again'] and list(r.tokens)==want['trained']
    columns = token_columns(r, 1.)
    assert columns['targets'][columns['mask']==1].tolist()==want['trained']

def test_q04_a_group_with_one_missing():
    given,_ = case('q04')
    with pytest.raises(ValueError, match=f'asked for {given["asked"]} samples, got {given["returned"]}'): rolled(answered(*[([5], 'stop')]*given['returned']), given['asked'])
    assert len(rolled(answered(*[([5], 'stop')]*given['asked']), given['asked']))==given['asked']

def test_q05_greedy_text_that_flips(pair):
    given,want = case('q05')
    study,runs = pair
    same = [evaluate_again(study, 'gs1_kernel', runs, in_flight=n) for n in given['batch_sizes']]
    assert [f.text for f in same]==[0]*given['runs'] and same[0].n==study.spec.eval.n_examples
    decide(study, runs)
    stored = lambda: json.loads((runs/study.name/'decision.json').read_text())
    assert 'notes' not in stored()
    f = completed(study, 'gs1_kernel', runs)[0]/'again.jsonl'
    rows = read_rows(f); rows[0]['text'] += ' or so'
    f.write_text(''.join(json.dumps(r)+'\n' for r in rows))
    try:
        d = decide(study, runs)
        assert stored()['notes']==['gs1_kernel: 1 of 5 items have another text when they are evaluated again, 0 another grade'] and flips(rows, read_rows(f.with_name('eval.jsonl'))).text>want['noted_above']
        assert stored()['notes'][0] in report(study, runs).read_text()
    finally: f.unlink()
    assert str(decide(study, runs))==str(d) and 'notes' not in stored()

def test_q06_what_was_asked_for_again(engine):
    problems = load_task('arith', 'validation')[:3]
    prompt = Prompt(renderer='chat', system=None, shots=[], prefix='', suffix='', chat_template_kwargs={})
    def rows(waits):
        with Server(Limited(App([Backend('tiny_arith', engine)]), 'asample', waits, 503)) as s:
            sc = connect(s.base_url, 'tiny_arith'); sampler = now(sc.create_sampling_client(base_model='tiny_arith'))
            out = [r for b in greedy_rows(sampler, learner(sc).get_tokenizer(), problems, prompt, 8, 'marker', in_flight=1) for r in b]
            bodies = s.app.bodies; sc.close('success').result()
        return out,bodies
    (calm,sent),(rough,again) = rows([]),rows([.1, .1])
    assert [r['retries'] for r in calm]==[0,0,0] and [r['retries'] for r in rough]==[2,0,0]
    assert rxnb.evaluate.summarise(rough)[case('q06')[1]['counted']]==1 and rxnb.evaluate.summarise(calm)['n_retried']==0
    assert len(again)==len(sent)+2 and again[0]==again[1]==again[2] # prompt and seed among it
    assert [r['text'] for r in rough]==[r['text'] for r in calm]

def test_q07_a_template_that_changed(pair, tmp_path):
    _,want = case('q07')
    study,runs = pair
    page = report(study, runs).read_text()
    for a in study.arms: assert f'{completed(study, a.name, runs)[1]["eval"][want["shown"]]:.2%}' in page
    tokenizer = learner(connect(base_model='tiny_arith')).get_tokenizer()
    raw = tiny(arms=('grpo_gs8',))
    pins = {'2 + 2?': render(tokenizer, '2 + 2?', load_spec(raw).spec.prompt)}
    good = load_spec(dict(raw, prompt=dict(raw['prompt'], pinned=pins)))
    assert pinned_line(tokenizer, good.spec.prompt)[0].passed and not pinned_line(tokenizer, load_spec(raw).spec.prompt)
    thinking = load_spec(dict(raw, prompt=dict(raw['prompt'], pinned={q: [*ids, 9] for q,ids in pins.items()})))
    assert not pinned_line(tokenizer, thinking.spec.prompt)[0].passed
    with pytest.raises(ValueError, match="the prompt of '2 \\+ 2\\?' has"): execute(thinking, 'grpo_gs8', runs_dir=tmp_path)
    assert not list(tmp_path.glob('*/*/attempt_*'))

def test_q09_equal_rollouts():
    given,_ = case('q09')
    raw = tiny()
    assert given['num_samples']==8
    with pytest.raises(ValueError, match='drawn at temperature 1'): load_spec(dict(raw, sampling=dict(raw['sampling'], temperature=given['temperature'])))

def test_q10_a_sampler_that_moves(service, pair):
    study,_ = pair
    tc = learner(service); tc.save_weights_for_sampler('taken').result()
    with pytest.raises(tinker.RequestFailedError, match='never change'): tc.save_weights_for_sampler('taken').result()
    import pandas as pd
    folder = completed(*[study, 'gs1_kernel', pair[1]])[0]
    drawn = pd.read_parquet(folder/'rollouts.parquet')
    assert {(r['step'], r['sampler_version']) for r in read_rows(folder/'steps.jsonl')}==set(zip(drawn.step, drawn.sampler_version))
    made = []
    class Moving:
        "A sampling client that always samples with the newest weights."
        def sample(self, *a, **k): return made[-1].sample(*a, **k)
    class Service:
        def create_sampling_client(self, model_path): made.append(now(service.create_sampling_client(model_path=model_path))); return Moving()
        def __getattr__(self, k): return getattr(service, k)
    problems = prepare(study, 'gs1_kernel').problems[:8]
    lines = lambda s: {l.what: l.passed for l in check_samplers(s, study.spec, study.arm('gs1_kernel').loss, submit_loss, problems).lines}
    assert not lines(Service())['frozen sampler after a step'] and lines(service)['frozen sampler after a step']

# Notebook

def test_n01_a_numpy_parameter(tmp_path):
    given,want = case('n01')
    with pytest.raises(ValueError, match=want['named']): run_arm('gs1_tiny', 'gs1_kernel', tmp_path, base_url=np.int64(given['value']))
    assert not list(tmp_path.iterdir())

def untagged(folder):
    nb = nbformat.read(notebook('run_arm.ipynb'), 4)
    for c in nb.cells: c.metadata.pop('tags', None)
    nbformat.write(nb, folder/'run_arm.ipynb')
    return folder/'run_arm.ipynb'

def by_papermill(path, out, **given):
    papermill.execute_notebook(str(path), str(out), parameters=given, progress_bar=False)

def test_n03_a_parameter_with_another_name(tmp_path):
    given,_ = case('n03')
    with pytest.raises(ValueError, match=given['passed']): run_arm('gs1_tiny', 'gs1_kernel', tmp_path, **{given['passed']: 1.})
    with pytest.raises(ValueError, match=given['passed']): only_declared(['', f'{given["declared"]} = 1', f'# Parameters\n{given["passed"]} = 2'], (given['declared'],))

def test_n04_no_tag(tmp_path, monkeypatch):
    given,_ = case('n04')
    path = untagged(tmp_path)
    with monkeypatch.context() as m:
        m.setattr(rxnb.study, 'notebook', lambda name: path)
        with pytest.raises(ValueError, match='no cell tagged'): run_arm('gs1_tiny', 'gs1_kernel', tmp_path/'runs')
    with pytest.raises(papermill.PapermillExecutionError, match='the defaults came after them') as e: by_papermill(path, tmp_path/'out.ipynb', arm='grpo_gs8', runs_dir=str(tmp_path/'runs'))
    assert e.value.ename=='ValueError' and not (tmp_path/'runs').exists()
    with pytest.raises(ValueError, match="'LAG'"): only_declared(['', f'# Parameters\nLAG = {given["passed"]}', f'LAG = {given["default"]}'], ('LAG',))

@pytest.fixture(scope='module')
def dead_kernel(tmp_path_factory):
    "An arm whose kernel killed itself, once, when three steps were there."
    tmp = tmp_path_factory.mktemp('dead')
    runs,raw = tmp/'runs',tiny(steps=5, arms=('grpo_gs8',))
    spec = tmp/'gs1_tiny.json'; spec.write_text(json.dumps(raw))
    nb = nbformat.read(notebook('run_arm.ipynb'), 4)
    k = next(i for i,c in enumerate(nb.cells) if 'parameters' in c.metadata.get('tags', []))
    kill = f"import os, threading, time\nfrom pathlib import Path\ndef watch():\n    while not any(len(f.read_bytes().splitlines())>2 for f in Path({str(runs)!r}).glob('*/*/attempt_1/steps.jsonl')): time.sleep(.01)\n    Path({str(tmp/'killed')!r}).touch(); os.kill(os.getpid(), 9)\nif not Path({str(tmp/'killed')!r}).exists(): threading.Thread(target=watch, daemon=True).start()"
    nb.cells.insert(k+1, nbformat.v4.new_code_cell(kill))
    nbformat.write(nb, tmp/'run_arm.ipynb')
    with pytest.MonkeyPatch.context() as m:
        m.setattr(rxnb.study, 'notebook', lambda name: tmp/'run_arm.ipynb'); m.setenv('RXNB_CHECKPOINT_EVERY', '2')
        with pytest.raises(Exception): run_arm(str(spec), 'grpo_gs8', runs)
    return load_spec(raw),runs

def test_n06_the_kernel_is_killed(dead_kernel):
    _,want = case('n06')
    study,runs = dead_kernel
    folder,_,result = attempts(study, 'grpo_gs8', runs)[0]
    assert (result['status'], result['cause'])==(want['status'], 'Killed') and len(read_rows(folder/'steps.jsonl'))>=3 and completed(study, 'grpo_gs8', runs) is None
    assert last_state(study, 'grpo_gs8', runs)[1].step>=2 and read_status(study, runs)['arms']['grpo_gs8']['state']=='failed'

def test_n07_a_failed_notebook_again(dead_kernel, tmp_path):
    study,runs = dead_kernel
    failed = attempts(study, 'grpo_gs8', runs)[0][0]/'run.ipynb'
    by_papermill(failed, tmp_path/'again.ipynb')
    (first,_,_),(_,manifest,result) = attempts(study, 'grpo_gs8', runs)
    assert result['status']=='succeeded' and manifest['continues']['step']>=2 # the steps that were saved are not made again
    rows = lambda nth: steps_of(study, 'grpo_gs8', runs, nth=nth)
    n = manifest['continues']['step']
    assert [r['time_s'] for r in rows(1)][:n]==[r['time_s'] for r in rows(0)][:n] and len(rows(1))==5

RUNS = {'execute','run_arm','run_study','run_warm_start','run_pilot','run_preflights'}

def run_by(cells):
    "Names of the packaged specs that a notebook's cells run, read off their text."
    known,names = {},set()
    for c in cells:
        try: tree = ast.parse(c)
        except SyntaxError: continue # a cell with magics
        spec = lambda x: x.value if isinstance(x, ast.Constant) else known.get(x.id) if isinstance(x, ast.Name) else spec(x.args[0]) if isinstance(x, ast.Call) and getattr(x.func, 'id', '')=='load_spec' and x.args else None
        refused = {id(n) for t in ast.walk(tree) if isinstance(t, ast.Call) and getattr(t.func, 'id', '')=='test_fail' for n in ast.walk(t)}
        for n in ast.walk(tree):
            if isinstance(n, ast.Assign) and isinstance(n.targets[0], ast.Name): known[n.targets[0].id] = spec(n.value)
        names |= {spec(n.args[0]) for n in ast.walk(tree) if isinstance(n, ast.Call) and getattr(n.func, 'id', '') in RUNS and n.args and id(n) not in refused}
    return names & set(spec_names())

def test_n08_what_notebooks_train_is_tiny():
    "A cell that trains a packaged study in a test has `eval: false`, or the study is of the packaged model; and a notebook is given so many seconds."
    given,want = case('n08')
    assert run_by(["s = load_spec('gsm8k_smoke')\nexecute(s, 'grpo')", "test_fail(lambda: execute(load_spec('gs1_kernel'), 'a'))", "run_arm('gs1_tiny', 'a')"])=={'gsm8k_smoke','gs1_tiny'}
    found = set()
    for f in sorted((Path(__file__).parents[1]/'nbs').glob('*.ipynb')):
        cells = [''.join(c['source']) for c in json.loads(f.read_text(encoding='utf-8'))['cells'] if c['cell_type']=='code']
        found |= {(f.name, n) for n in run_by([c for c in cells if not re.match(r'#\| *(eval: *false|slow|export)', c)])}
    assert found and {load_spec(n).spec.base_model for _,n in found}=={want['base_model']}, found
    limit, = [m for m in test_notebooks.test_runs.pytestmark if m.name=='timeout']
    assert limit.args==(given['limit_s'],)

# The mapping itself

def test_every_case_has_one_test(): assert len(CASES)==35; check_mapping(globals(), CASES)
def test_the_cases_are_those_of_the_file(): check_source(CASES, AREAS)
