"""The client alone: the real SDK is answered from a recorded conversation, without an engine and without a network. A request that differs from the recorded one is refused, and the refusal names the field."""
import base64, json, math, os, re, socket
os.environ['OMP_NUM_THREADS'] = '1'; os.environ['TINKER_TELEMETRY'] = '0'
import pytest, tinker, torch
import rxnb.rollouts, rxnb.train
from record_conversation import ARMS, FILE, KEY, MODEL, QUIET, heard, read_request, run_arm, spec
from rxnb.serve import Server, packaged_models

torch.set_num_threads(1)
LINES = [json.loads(x.replace(f'<{MODEL}>', str(packaged_models()[MODEL]))) for x in FILE.read_text(encoding='utf-8').splitlines()]
if LINES[0]['sdk'].split('.')[:2]!=tinker.__version__.split('.')[:2]: pytest.skip(f'recorded with SDK {LINES[0]["sdk"]}, this is {tinker.__version__}: another one says other things', allow_module_level=True)

def recorded(arm):
    "What was said while an arm ran, and its rows."
    begin = LINES.index(dict(arm=arm))+1; end = next(i for i,x in enumerate(LINES) if i>=begin and 'rows' in x)
    return LINES[begin:end],LINES[end]['rows']

def differences(old, new, at=''):
    "Where two JSON values differ, the first first; numbers with a point may differ in the last bits of a float32, which are the processor's."
    if isinstance(old, dict) and isinstance(new, dict):
        for k in [*old, *(k for k in new if k not in old)]:
            here = f'{at}.{k}'.strip('.')
            if k=='sdk_version': continue
            if k not in new: yield f'{here} was recorded, and is missing'
            elif k not in old: yield f'{here} was not recorded, and is {str(new[k])[:60]}'
            else: yield from differences(old[k], new[k], here)
    elif isinstance(old, list) and isinstance(new, list):
        if len(old)!=len(new): yield f'{at}: recorded {len(old)} values, now {len(new)}'
        for i,(x,y) in enumerate(zip(old, new)): yield from differences(x, y, f'{at}[{i}]')
    elif isinstance(old, float) and isinstance(new, float):
        if not math.isclose(old, new, rel_tol=1e-6, abs_tol=1e-9): yield f'{at}: recorded {old}, now {new}'
    elif type(old)!=type(new) or old!=new: yield f'{at}: recorded {str(old)[:60]}, now {str(new)[:60]}'

class Replay:
    "An ASGI application that answers as was recorded: the next request of a route, or one that was answered already and is sent again."
    def __init__(self, said): self.left,self.answered,self.trouble = list(said),[],[]

    def answer(self, method, path, query, sent):
        "The recorded exchange, or a text that says what differs."
        route = [x for x in self.left if (x['method'], x['path'])==(method, path)]
        same = lambda x: (x['method'], x['path'], x['query'])==(method, path, query) and not any(differences(x['sent'], sent))
        if k := KEY.get(path): due = [x for x in route if all(x['sent'][f]==sent.get(f) for f in k)]
        else: due = route[:1]
        if due and same(due[0]):
            self.left.remove(due[0]); self.answered.append(due[0])
            return due[0]
        if again := [x for x in self.answered if same(x)]: return again[0]
        if not due: return f'{method} {path} was not recorded' + (f' for {[sent.get(f) for f in k]}' if k else ' once more' if any(x['path']==path for x in self.answered) else '')
        found = [*differences(due[0]['sent'], sent), *differences(due[0]['query'], query, 'query')]
        return f'{path}: {"; ".join(found[:3])}' + (f'; and {len(found)-3} more' if found[3:] else '')

    async def __call__(self, scope, receive, send):
        body,_ = await heard(receive); path = scope['path'].removeprefix('/api/v1/')
        x = dict(status=200, kind='application/json', answer={}) if path in QUIET else self.answer(scope['method'], path, scope['query_string'].decode(), read_request(path, {k.decode().lower(): v.decode() for k,v in scope['headers']}, body))
        if isinstance(x, str): self.trouble.append(x); x = dict(status=400, kind='application/json', answer=dict(detail=x))
        out = json.dumps(x['answer']).encode() if x['kind']=='application/json' else base64.b64decode(x['answer'])
        await send(dict(type='http.response.start', status=x['status'], headers=[(b'content-type', x['kind'].encode()), (b'content-length', str(len(out)).encode())]))
        await send(dict(type='http.response.body', body=out))

    def close(self): pass

@pytest.fixture(autouse=True)
def alone(monkeypatch):
    "No engine is made, and no Python socket leaves this machine."
    def refused(*a, **kw): raise AssertionError('a replay needs no engine')
    monkeypatch.setattr('rxnb.engine.Engine.__init__', refused)
    connect = socket.socket.connect
    def inside(s, address):
        assert s.family==socket.AF_UNIX or address[0] in ('127.0.0.1', '::1'), f'{address} is not this process'
        return connect(s, address)
    monkeypatch.setattr(socket.socket, 'connect', inside)

def replay(arm, folder, raw=None, said=None):
    "The rows of an arm whose endpoint is the recording, and what the recording has to say."
    r = Replay(said or recorded(arm)[0])
    with Server(r) as s:
        try: return run_arm(raw or spec(), arm, folder, s.base_url),r
        except tinker.TinkerError as e: return e,r

@pytest.mark.parametrize('arm', ARMS)
def test_the_arm_runs_as_recorded(arm, tmp_path):
    rows,r = replay(arm, tmp_path)
    assert r.trouble==[] and r.left==[]
    assert list(differences(recorded(arm)[1], json.loads(json.dumps(rows))))==[] and [len(rows[k]) for k in ('steps', 'rollouts', 'eval')]==[2, 16, 6]

def other(change):
    "A spec with a change."
    def make(monkeypatch): raw = spec(); change(raw); return raw
    return make

def datums(change):
    "A client whose datums are changed before they leave."
    def make(monkeypatch):
        was = rxnb.train.make_datum
        def changed(columns, side=True):
            d = was(columns, side)
            return tinker.Datum(model_input=d.model_input, loss_fn_inputs=change(dict(d.loss_fn_inputs), columns))
        monkeypatch.setattr(rxnb.train, 'make_datum', changed)
    return make

def without(name): return lambda inputs, c: {k: v for k,v in inputs.items() if k!=name}

def seeds(monkeypatch): monkeypatch.setattr(rxnb.rollouts, 'request_seed', lambda *parts: 1)

def half_gradient(monkeypatch):
    was = rxnb.train.torch_loss
    def wrong(*a, **kw):
        loss = was(*a, **kw)
        def halved(data, logps): l,m = loss(data, logps); return l/2,m
        return halved
    monkeypatch.setattr(rxnb.train, 'torch_loss', wrong)

CHANGED = {   # arm, change, what the refusal says
    'learning rate':  ('grpo_gs8', other(lambda s: s['arms'][0].update(lr=3e-4)), 'optim_step: adam_params.learning_rate: recorded 0.00015, now 0.0003'),
    'seeds':          ('grpo_gs8', seeds, r'asample: sampling_params.seed: recorded \d+, now 1\b'),
    'no advantages':  ('grpo_gs8', datums(without('advantages')), r'forward_backward: data\[0\].advantages was recorded, and is missing'),
    'unshifted':      ('grpo_gs8', datums(lambda d, c: dict(d, target_tokens=c['tokens'])), r'forward_backward: data\[0\].target_tokens\[0\]: recorded 131, now 1;'),
    'whole sequence': ('gs1_kernel', datums(lambda d, c: dict(d, advantages=c['advantage']*0+c['advantage'][-1])), r'forward_backward: data\[0\].advantages\[0\]: recorded 0.0, now'),
    'half gradient':  ('centered', half_gradient, r'forward_backward: data\[\d\].weights\[\d+\]\[0\]: recorded'),
}

@pytest.mark.parametrize('name', CHANGED)
def test_a_change_of_the_client_is_named(name, tmp_path, monkeypatch):
    arm,change,says = CHANGED[name]
    e,r = replay(arm, tmp_path, change(monkeypatch))
    assert isinstance(e, tinker.BadRequestError), r.trouble
    assert re.search(says, str(e)) and any(x in str(e) for x in r.trouble)

def test_what_was_not_asked_is_left(tmp_path):
    raw = spec(); raw['eval']['n_examples'] = 5
    rows,r = replay('grpo_gs8', tmp_path, raw)
    assert r.trouble==[] and len(rows['eval'])==5 and [(x['path'], x['sent'].get('seq_id')) for x in r.left][0]==('asample', 5)

def test_the_recording_is_small_and_nobodys():
    "No key, no path of the machine on which it was made, no id of a real session."
    text = FILE.read_text(encoding='utf-8')
    assert len(text)<300_000
    assert not any(x in text for x in ('tml-', '/home', '/tmp', '/root', '/work', '127.0.0.1', 'X-API-Key')) and not re.search(r'[0-9a-f]{32}|[0-9a-f]{8}-[0-9a-f]{4}', text)
