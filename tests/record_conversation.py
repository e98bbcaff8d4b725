"""Record what the SDK and the embedded server say to each other while a small arm runs: python tests/record_conversation.py
Writes tests/conversation.jsonl, from which test_replay.py answers the SDK without an engine. Needed again only where the client is meant to say something else."""
import base64, copy, json, os, re, sys, tempfile
os.environ['OMP_NUM_THREADS'] = '1'; os.environ['TINKER_TELEMETRY'] = '0'
from itertools import groupby
from pathlib import Path
import numpy as np, tinker
from rxnb.records import attempts, read_rows
from rxnb.serve import packaged_models
from rxnb.spec import load_spec
from rxnb.study import execute
from rxnb.wire import loss_config, read_datum, read_forward_backward, unpack

FILE,MODEL,ARMS = Path(__file__).with_name('conversation.jsonl'),'tiny_arith',('grpo_gs8', 'gs1_kernel', 'centered')
ROWS = ('steps', 'rollouts', 'eval')

def spec():
    "gs1_tiny with two steps of eight rollouts and six items: groups; the log-probabilities of prompts; a loss of three targets a position that the client computes."
    raw = copy.deepcopy(load_spec('gs1_tiny').raw)
    raw.update(name='recorded', steps=2, batch_size=8, max_seq_len=96, curve=None, eval=dict(n_examples=6, max_tokens=16, metric='accuracy'))
    raw['sampling'] = dict(raw['sampling'], max_tokens=12)
    raw['arms'][2].update(name='centered', control=True, loss=dict(name='centered_mc', params=dict(auxiliary='draws', k=2, correction='none')))
    for a in raw['arms']:
        a['group_size'] = min(4, a['group_size']); a['groups_per_batch'] = 8//a['group_size']
        if 'group_size' in a['advantage']['params']: a['advantage']['params']['group_size'] = a['group_size']
    return raw

def run_arm(raw, arm, runs, base_url):
    "The rows of an arm, without what a clock wrote."
    runs.mkdir(parents=True, exist_ok=True); (runs/'spec.json').write_text(json.dumps(raw)); study = load_spec(str(runs/'spec.json'))
    execute(study, arm, base_url=base_url, runs_dir=runs)
    (folder,_,_), = attempts(study, arm, runs)
    if (folder/'rollouts.parquet').exists():
        import pandas as pd
        packed = json.loads(pd.read_parquet(folder/'rollouts.parquet').to_json(orient='records', double_precision=15))
    bare = lambda r: {k: v for k,v in r.items() if k!='spec_sha256' and not k.endswith(('_s', '_per_s'))}
    return {name: [bare(r) for r in (packed if name=='rollouts' else read_rows(folder/f'{name}.jsonl'))] for name in ROWS}

# ---- an exchange as it can be read
def plain(a):
    "Numbers of an array, float32 in its shortest form."
    return [plain(x) for x in a] if a.ndim>1 else [float(str(x)) for x in a] if a.dtype==np.float32 else a.tolist()

def read_request(path, headers, body):
    "What a request says, training data as numbers."
    if not body: return None
    body = unpack(body, headers.get('content-encoding', ''), 2**24)
    if path!='forward_backward': return json.loads(body)
    m = read_forward_backward(body); data = [read_datum(d, i) for i,d in enumerate(m.data)]
    return dict(model_id=m.model_id, seq_id=m.seq_id, forward_only=m.forward_only, loss_fn=m.loss_fn, loss_fn_config=loss_config(m), data=[dict(tokens=plain(t), **{k: plain(v) for k,v in sorted(inputs.items())}) for t,inputs in data])

QUIET = ('healthz', 'session_heartbeat', 'telemetry')   # of a clock, not of the client's doing

async def heard(receive):
    "The body of a request, and a `receive` that gives it again."
    parts = []
    while True:
        parts.append(await receive())
        if not parts[-1].get('more_body'): break
    again = iter([dict(type='http.request', body=(body := b''.join(p.get('body', b'') for p in parts)), more_body=False)])
    async def give():
        for m in again: return m
        return await receive()
    return body,give

class Recorder:
    "An ASGI application that writes down what another is asked and answers."
    def __init__(self, app): self.app,self.said = app,[]
    async def __call__(self, scope, receive, send):
        body,again = await heard(receive); path = scope['path'].removeprefix('/api/v1/'); out,kept = b'',{}
        headers = {k.decode().lower(): v.decode() for k,v in scope['headers']}
        line = dict(method=scope['method'], path=path, query=scope['query_string'].decode(), sent=read_request(path, headers, body))
        if path not in QUIET: self.said.append(line)
        async def keep(m):
            nonlocal out
            out += m.get('body', b'')
            if m['type']=='http.response.start': kept.update(status=m['status'], kind=dict(m['headers'])[b'content-type'].decode())
            await send(m)
        await self.app(scope, again, keep)
        line.update(kept, answer=json.loads(out) if kept['kind']=='application/json' else base64.b64encode(out).decode())
    def __getattr__(self, k): return getattr(self.app, k)

KEY = dict(asample=('sampling_session_id', 'seq_id'), retrieve_future=('request_id',))   # many are on their way at once; all else comes in order

def ordered(said):
    "What was on its way at once in the order in which it was meant, so that two recordings differ in what was said only."
    out,asked = [],[]
    for together,run in groupby(said, lambda x: x['path'] in KEY):
        run = list(run)
        if together:
            first = sorted((x for x in run if x['path']=='asample'), key=lambda x: (x['sent']['sampling_session_id'], x['sent']['seq_id']))
            asked += [x['answer']['request_id'] for x in first]
            run = first+sorted((x for x in run if x['path']!='asample'), key=lambda x: asked.index(x['sent']['request_id']))
        else: asked += [x['answer']['request_id'] for x in run if isinstance(x['answer'], dict) and 'request_id' in x['answer']]
        out += run
    return out

def normalised(said):
    "The exchanges as lines with plain ids, without the polls that brought nothing."
    said = ordered([x for x in said if x['status']!=408]); text = '\n'.join(json.dumps(x, separators=(',', ':')) for x in said)
    for kind,key in (('session', 'session_id'), ('promise', 'request_id')):
        for n,i in enumerate(dict.fromkeys(x['answer'][key] for x in said if isinstance(x['answer'], dict) and key in x['answer'])): text = text.replace(i, f'{kind}-{n}')
    text = re.sub(r'\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ', '2026-01-01T00:00:00Z', text)
    return text.replace(str(packaged_models()[MODEL]), f'<{MODEL}>')

def record(folder):
    "The recording: what was said and which rows came of it, arm by arm."
    import torch; torch.set_num_threads(1)
    from rxnb.engine import Engine
    from rxnb.serve import App, Backend, Server
    lines = [json.dumps(dict(about='A conversation of the SDK with the embedded server', sdk=tinker.__version__))]
    for arm in ARMS:
        with Server(rec := Recorder(App([Backend(MODEL, Engine(packaged_models()[MODEL], device='cpu'))]))) as s: rows = run_arm(spec(), arm, Path(folder)/arm, s.base_url)
        lines += [json.dumps(dict(arm=arm)), *normalised(rec.said).split('\n'), json.dumps(dict(rows=rows))]
    return '\n'.join(lines)+'\n'

if __name__=='__main__':
    with tempfile.TemporaryDirectory() as folder: FILE.write_text(text := record(folder))
    print(f'{FILE}: {len(text.splitlines())} lines, {len(text)/1024:.0f} KB', file=sys.stderr)
