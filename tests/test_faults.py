"""An endpoint in trouble: rate limits, errors, timeouts, lost answers. The SDK repeats, rxnb shows it and adds nothing; and where the SDK gives up, an arm ends with its rows."""
import copy, json, logging, os, time
os.environ['OMP_NUM_THREADS'] = '1'; os.environ['TINKER_TELEMETRY'] = '0'
import numpy as np, pytest, tinker, torch
from tinker import types
from wire_flow import ADAM, PROMPT, now, text
from rxnb.connect import connect, waiting
from rxnb.engine import Engine
from rxnb.records import attempts, read_rows
from rxnb.serve import App, Backend, Server, packaged_models
from rxnb.spec import load_spec
from rxnb.study import execute

torch.set_num_threads(1)

class Faulty:
    "A server behind a proxy that fails as planned: {route: [fault, …]}; a fault is a status, 'drop' (before the server hears of it) or 'lose' (the server did it, its answer is cut off)."
    def __init__(self, app): self.app,self.plan,self.seen = app,{},[]
    async def __call__(self, scope, receive, send):
        route = scope['path'].removeprefix('/api/v1/').split('/')[0]
        todo = self.plan.get(route) or self.plan.get('*') or []
        fault = 503 if todo=='always' else todo.pop(0) if todo else None
        self.seen.append((route, fault or 200))
        if fault is None: return await self.app(scope, receive, send)
        if isinstance(fault, int):
            while (await receive()).get('more_body'): pass
            await send(dict(type='http.response.start', status=fault, headers=[(b'content-type', b'application/json'), (b'retry-after', b'0.1')])); return await send(dict(type='http.response.body', body=b'{"detail": "planned"}'))
        async def half(m):
            if m['type']=='http.response.start': m = dict(m, headers=[(b'content-length', b'1000000')])
            else: m = dict(m, more_body=True)
            await send(m)
        if fault=='lose': await self.app(scope, receive, half)
        else: await send(dict(type='http.response.start', status=200, headers=[(b'content-length', b'1000000')]))
        raise ConnectionAbortedError('planned')      # uvicorn cuts the connection
    def close(self): self.app.close()
    def __getattr__(self, k): return getattr(self.app, k)

@pytest.fixture(scope='module')
def engine(): return Engine(packaged_models()['tiny_arith'], device='cpu')

@pytest.fixture
def faulty(engine):
    app = Faulty(App([Backend('tiny_arith', engine)]))
    logging.getLogger('uvicorn.error').setLevel(logging.CRITICAL)
    with Server(app) as s: yield s
    logging.getLogger('uvicorn.error').setLevel(logging.NOTSET)

def trainer(s):
    sc = connect(s.base_url, 'tiny_arith')
    return sc,now(sc.create_lora_training_client(base_model='tiny_arith', rank=2, seed=0))

DATA = [types.Datum(model_input=text(range(10, 20)), loss_fn_inputs=dict(target_tokens=np.arange(11, 21), weights=np.ones(10, np.float32)))]

def test_a_rate_limit_is_shown_and_three_tries_are_made(faulty, caplog):
    sc,tc = trainer(faulty); tc.forward_backward(DATA, 'cross_entropy').result()
    faulty.app.plan['optim_step'] = [429, 429]; faulty.app.seen.clear()
    with caplog.at_level(logging.WARNING, 'rxnb.connect'): tc.optim_step(ADAM).result()
    assert [s for r,s in faulty.app.seen if r=='optim_step']==[429, 429, 200]     # the SDK's tries and no more
    said = [r.getMessage() for r in caplog.records if r.name=='rxnb.connect']
    assert 'HTTP 429 on optim_step' in said[0] and 'answers again' in said[-1] and '3 tries' in said[-1] and waiting.since is None
    assert faulty.app.models[tc.model_id].lora.step==1
    sc.close('success').result()

@pytest.mark.parametrize('fault', ['lose', 'drop', 503])
def test_a_step_whose_answer_was_lost_is_made_once(faulty, fault):
    sc,tc = trainer(faulty); lora = faulty.app.models[tc.model_id].lora
    for route in ('forward_backward', 'optim_step', 'save_weights_for_sampler'): faulty.app.plan[route] = [fault]
    tc.forward_backward(DATA, 'cross_entropy').result(); g = {k: v.clone() for k,v in lora.grads.items()}
    tc.optim_step(ADAM).result(); tc.save_weights_for_sampler('v1').result()
    assert lora.step==1 and len(faulty.app.store.all)==1
    assert [s for r,s in faulty.app.seen if r=='optim_step']==[fault, 200]
    _,clean = trainer(faulty); clean.forward_backward(DATA, 'cross_entropy').result(); other = faulty.app.models[clean.model_id].lora.grads
    assert all(torch.equal(g[k], other[k]) for k in g)      # the gradient was not added twice either
    sc.close('success').result()

def run_arm(spec, arm, runs, base_url):
    "In this process, so that a test can hold its clock."
    runs.mkdir(exist_ok=True)
    return execute(load_spec(spec), arm, base_url=base_url, runs_dir=runs)

def taught(folder):
    "Rows of an arm that stopped: none is missing before the last, and so many had a gradient."
    rows = read_rows(folder/'steps.jsonl')
    assert [r['step'] for r in rows]==list(range(len(rows)))
    return sum(r['skipped'] is None for r in rows)

def small(folder, name='faults'):
    raw = copy.deepcopy(load_spec('gs1_tiny').raw)
    raw.update(name=name, steps=5, batch_size=16, curve=None, eval=dict(n_examples=8, max_tokens=16, metric='accuracy'))
    raw['sampling'] = dict(raw['sampling'], max_tokens=12)
    for a in raw['arms']: a['groups_per_batch'] = 16//a['group_size']
    (folder/f'{name}.json').write_text(json.dumps(raw))
    return folder/f'{name}.json'

NUMBERS = ('reward_mean', 'loss_sum', 'grad_norm', 'completion_tokens')

def test_an_arm_in_trouble_ends_as_one_without(faulty, tmp_path):
    "Every route fails once or twice in its own way; the rows are the same."
    spec = small(tmp_path); run_arm(spec, 'grpo_gs8', tmp_path/'calm', base_url=faulty.base_url)
    faulty.app.plan.update(asample=[429, 'lose', 503, 'drop'], forward_backward=['lose'], optim_step=[503, 'drop'], save_weights_for_sampler=['lose'], retrieve_future=[503, 429, 'drop'], create_sampling_session=['lose'])
    run_arm(spec, 'grpo_gs8', tmp_path/'rough', base_url=faulty.base_url)
    calm,rough = (read_rows(next((tmp_path/d).rglob('steps.jsonl'))) for d in ('calm', 'rough'))
    assert not any(faulty.app.plan.values()) and [[r.get(k) for k in NUMBERS] for r in calm]==[[r.get(k) for k in NUMBERS] for r in rough]

def test_an_arm_stops_with_its_rows_when_the_sdk_gives_up(faulty, tmp_path, monkeypatch):
    "The SDK tries for five minutes; its clock runs fast here."
    import tinker.lib.internal_client_holder as holder
    class Fast:
        def __getattr__(self, k): return getattr(time, k)
        def time(self): return 60*time.time()
    spec = small(tmp_path)
    def broken(q_app=faulty.app):
        n = len([1 for r,s in q_app.seen if r=='optim_step'])
        return n>=2
    class Down(dict):
        def get(self, route, default=None): return 'always' if broken() and route=='forward_backward' else default
    faulty.app.plan = Down(); monkeypatch.setattr(holder, 'time', Fast())
    with pytest.raises(tinker.TinkerError): run_arm(spec, 'grpo_gs8', tmp_path/'runs', base_url=faulty.base_url)
    (folder,_,result), = attempts(load_spec(spec), 'grpo_gs8', tmp_path/'runs')
    assert result['status']=='failed' and 'InternalServerError' in result['cause'] and taught(folder)==2

def test_a_server_that_was_started_anew_ends_the_arm_at_once(engine, tmp_path):
    "Its session is gone: no five minutes of silence, and the rows stay."
    spec = small(tmp_path); seen = []
    class Amnesia(App):
        async def respond(self, q):
            if q.path=='optim_step':
                seen.append(q.path)
                if len(seen)==3: self.models.clear(); self.samplers.clear(); self.sessions.clear()
            return await super().respond(q)
    with Server(Amnesia([Backend('tiny_arith', engine)])) as s:
        began = time.monotonic()
        with pytest.raises(tinker.NotFoundError, match='started anew'): run_arm(spec, 'grpo_gs8', tmp_path/'runs', base_url=s.base_url)
    (folder,_,result), = attempts(load_spec(spec), 'grpo_gs8', tmp_path/'runs')
    assert result['status']=='failed' and 'started anew' in result['message'] and taught(folder)==2
