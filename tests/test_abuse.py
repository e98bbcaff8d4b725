"A thousand malformed requests, and sixteen clients at once: nothing falls over, nothing changes, nothing is lost or crossed."
import json, os, random, time
from concurrent.futures import ThreadPoolExecutor
os.environ['OMP_NUM_THREADS'] = '1'; os.environ['TINKER_TELEMETRY'] = '0'
import httpx, numpy as np, pytest, tinker, torch, zstandard
from tinker import types
from tinker.proto import tinker_public_pb2 as pb
from wire_flow import ADAM, KEY, PROMPT, now, params, seqs, text
from rxnb.decode import SampleRequest
from rxnb.engine import random_model
from rxnb.serve import App, serve

torch.set_num_threads(1)
N,SEED = 1000,20261129
JUNK = [None, True, -1, 0, 2**31, 2**63, -2**70, 1e308, 'x', '', 'x'*5000, '../../etc/passwd', '\u0000', [], [[]], {}, {'a': {}}, [1,'2'], [None], -.5, 'tinker://../../weights/x', float('nan'), float('inf')]

@pytest.fixture(scope='module')
def server(tmp_path_factory):
    tmp = tmp_path_factory.mktemp('abuse')
    with serve(random_model('qwen3', tmp/'model'), device='cpu', checkpoint_dir=tmp/'checkpoints') as s: s.name,s.folder = str(tmp/'model'),tmp; yield s

class Fuzzer:
    "Requests that are wrong on purpose, from a seeded generator; `victim` is a model with a gradient and a checkpoint, `goat` takes the numbered ones."
    def __init__(self, server, victim, goat, session, sampler, rng):
        self.server,self.victim,self.goat,self.session,self.sampler,self.rng,self.seq = server,victim,goat,session,sampler,rng,0
        self.http = httpx.Client(base_url=server.base_url+'/api/v1/', timeout=60, trust_env=False)
        self.made = [self.json_body, self.bytes_body, self.optim, self.forward_backward, self.asample, self.save, self.somewhere, self.zstd]

    def sampling(self): return dict(sampling_session_id=self.sampler, seq_id=self.rng.randrange(2**40), num_samples=1, prompt=dict(chunks=[dict(type='encoded_text', tokens=PROMPT)]), sampling_params=dict(max_tokens=4, temperature=1.))
    def spoilt(self, value): return self.rng.choice([j for j in JUNK if type(j)!=type(value)] or JUNK)

    def json_body(self):
        "A field of a plausible body, replaced by junk."
        plausible = dict(create_model=dict(session_id=self.session, model_seq_id=7, base_model=self.server.name, lora_config=dict(rank=2)), get_info=dict(model_id=self.victim), retrieve_future=dict(request_id='r'),
            create_sampling_session=dict(session_id=self.session, sampling_session_seq_id=9, base_model=self.server.name), load_weights=dict(session_id=self.session, model_seq_id=8, path='tinker://x/weights/y', optimizer=True),
            weights_info=dict(tinker_path='tinker://x/weights/y'), session_heartbeat=dict(session_id=self.session), unload_model=dict(model_id=self.victim), retrieve_futures=dict(target=dict(sampling_session_id=self.sampler)),
            join_sampling_session=dict(sampling_session_id=self.sampler), copy_weights=dict(source_path='tinker://x/weights/y', destination_project_id='p'), cancel_future=dict(request_id='r'))
        path = self.rng.choice(list(plausible)); b = plausible[path]; k = self.rng.choice(list(b)); b[k] = self.spoilt(b[k]) if self.rng.random()<.8 else b.pop(k) and None
        return 'POST',path,dict(content=json.dumps(b))

    def bytes_body(self):
        path = self.rng.choice(['create_session','create_model','optim_step','asample','forward_backward','retrieve_future','save_weights','copy_weights'])
        return 'POST',path,dict(content=self.rng.choice([self.rng.randbytes(self.rng.randrange(1, 200)), b'['*100_000, b'{"model_id":', b'\xff\xfe{}', b'null', b'3', b'"x"', b'{"a":1'+b',"a":1'*1000]))

    def numbered(self, path, b): return 'POST',path,dict(content=json.dumps(dict(b, model_id=self.goat, seq_id=self.seq+1)))

    def optim(self):
        p = ADAM.model_dump(); k = self.rng.choice(['learning_rate','beta1','beta2','eps','weight_decay','grad_clip_norm'])
        p[k] = self.rng.choice([None, 'x', [], {}, True, float('nan'), float('inf'), float('-inf'), -1.])
        return self.numbered('optim_step', dict(adam_params=p))

    def save(self):
        path = self.rng.choice(['save_weights','save_weights_for_sampler','save_weights_external','load_weights'])
        return self.numbered(path, dict(path=self.rng.choice(['../x', '/etc/passwd', 'a/b', '..', '', '.x', 'x'*200, 3, [], 'a\x00b', 'tinker://m/weights/x', '%2e%2e%2f']), optimizer=True, sampling_session_seq_id='x'))

    def forward_backward(self):
        m = pb.ForwardBackwardRequest(model_id=self.goat, seq_id=self.seq+1, loss_fn=self.rng.choice(['cross_entropy','importance_sampling','ppo','nope','']))
        for _ in range(self.rng.randrange(1, 3)):
            d = m.data.add() if hasattr(m, 'data') else m.forward_backward_input.data.add()
            d.model_input.add().encoded_text.tokens = np.array(PROMPT[:self.rng.randrange(2, 9)], '<i4').tobytes()
            for k in ('target_tokens','weights','logprobs','advantages'):
                t = d.loss_fn_inputs[k]; t.dtype = pb.DTYPE_INT64 if k=='target_tokens' else pb.DTYPE_FLOAT32
                t.dense = np.arange(4 if k!='target_tokens' else 4).astype('<i8' if k=='target_tokens' else '<f4').tobytes(); t.shape.extend([4])
        self.rng.choice([lambda: setattr(d.loss_fn_inputs['target_tokens'], 'dense', np.array([0, 10**9, 1, 2], '<i8').tobytes()), lambda: setattr(d.loss_fn_inputs['target_tokens'], 'dense', np.array([-5]*4, '<i8').tobytes()),
            lambda: d.loss_fn_inputs['target_tokens'].shape.extend([3]), lambda: setattr(d.loss_fn_inputs['target_tokens'], 'dense', b'abc'), lambda: d.loss_fn_inputs['target_tokens'].shape.append(-1),
            lambda: setattr(d.loss_fn_inputs['weights'], 'dense', np.full(7, np.nan, '<f4').tobytes()), lambda: setattr(d.model_input[0].encoded_text, 'tokens', np.array([2**31-1, -7], '<i4').tobytes()),
            lambda: d.ClearField('model_input'), lambda: setattr(d.loss_fn_inputs['target_tokens'], 'dtype', 0), lambda: d.loss_fn_inputs['target_tokens'].sparse_csr.CopyFrom(pb.SparseCSRTensor(values=b'x', crow_indices=b'y', col_indices=b'z')) if hasattr(pb, 'SparseCSRTensor') else d.ClearField('loss_fn_inputs'),
            lambda: d.ClearField('loss_fn_inputs'), lambda: setattr(m, 'loss_fn', 'nope')])()
        if m.loss_fn!='nope' and d.model_input and len(d.model_input[0].encoded_text.tokens)==16: d.loss_fn_inputs['target_tokens'].shape.extend([7])   # no accident makes it right
        return 'POST','forward_backward',dict(content=m.SerializeToString())

    def asample(self):
        b = self.sampling(); sp = b['sampling_params']
        self.rng.choice([lambda: b.update(num_samples=self.rng.choice([0, -1, 10**7, 'x', None, 1.5, True])), lambda: b.update(prompt=self.rng.choice(JUNK)), lambda: b['prompt'].update(chunks=self.rng.choice(JUNK)),
            lambda: b['prompt']['chunks'][0].update(tokens=self.rng.choice([[10**9], [-1], ['a'], [1.5], [True], [], None, [2**70], [[1]]])), lambda: b['prompt'].update(chunks=[dict(type='encoded_text', tokens=[1]*100_000)]),
            lambda: sp.update(max_tokens=self.rng.choice([0, -1, 10**9, 'x', None, 2**70, 1.5])), lambda: sp.update(temperature=self.rng.choice([-1, float('nan'), float('inf'), 'x', [], {}])),
            lambda: sp.update(top_p=self.rng.choice([0, -1, 1.5, float('nan'), 'x'])), lambda: sp.update(top_k=self.rng.choice([0, -5, 'x', 1.5, []])), lambda: sp.update(stop=self.rng.choice([[1,'a'], [''], {}, 3, [[1]], [None]])), lambda: sp.update(seed=self.rng.choice(['x', 1.5, [], 2**200])),
            lambda: b.update(topk_prompt_logprobs=self.rng.choice([-1, 10**9, 'x', []])), lambda: b.update(prompt_alt_tokens_k=self.rng.choice([-1, 10**9, 'x', []])), lambda: b.update(topk_sample_logprobs=self.rng.choice([-1, 10**9, 'x'])),
            lambda: b.update(prompt_logprobs_last_n=self.rng.choice([-1, 'x', []])), lambda: b.update(target_prompt_logprobs=self.rng.choice([dict(shape=[2,2], data=[1]), dict(shape=[-1], data=[]), dict(shape='x', data=[1]), dict(shape=[1,1], data=['a']), {'shape': [17, 1], 'data': [10**9]*17}, 'x'])),
            lambda: b.update(sampling_params=self.rng.choice(JUNK)), lambda: b.update(sampling_session_id=self.rng.choice(JUNK)), lambda: b.update(seq_id=self.rng.choice(['x', None, [], 1.5]))])()
        return 'POST','asample',dict(content=json.dumps(b))

    def somewhere(self):
        path = self.rng.choice(['../../etc/passwd', '%2e%2e/%2e%2e/etc/passwd', 'training_runs/../x', 'training_runs/x/checkpoints/weights/..', f'training_runs/{self.victim}/checkpoints/weights/%2e%2e', f'files/{self.victim}/x/../../y', 'training_runs?limit=-1', 'checkpoints?limit=x&offset=y',
            'training_runs?limit=99999999999999999999', 'sessions/x', 'samplers/x', 'samplers/%00', 'nonsense', '', '/', f'training_runs/{self.victim}/checkpoints/weights/kept/ttl', 'x'*5000])
        return self.rng.choice(['GET','PUT','DELETE','PATCH','HEAD','OPTIONS']),path,dict(content=b'{"ttl_seconds": "x"}')

    def zstd(self):
        return 'POST','forward_backward',dict(content=self.rng.choice([b'junk', zstandard.ZstdCompressor().compress(b'x'*1000), zstandard.ZstdCompressor().compress(b'\0'*(2**21)), zstandard.ZstdCompressor().compress(b'')[:-1]]), headers={'Content-Encoding': self.rng.choice(['zstd','gzip','br','zstd'])})

    def send(self):
        "Status of a request, and the failure that its promise holds, None where it holds a result."
        method,path,kw = self.rng.choice(self.made)()
        r = self.http.request(method, path, **kw); out = r.json() if 'json' in r.headers.get('content-type', '') and r.content else {}
        if r.status_code!=200 or 'request_id' not in out: return (method, path, kw),r.status_code,out,None
        if out.get('model_id')==self.goat: self.seq += 1     # what was accepted has used its number up
        p = self.http.post('retrieve_future', json=dict(request_id=out['request_id']))
        return (method, path, kw),r.status_code,out,p.json() if 'json' in p.headers['content-type'] else {}

def state(server, victim, goat):
    "What a malformed request must leave as it is."
    m,g = server.app.models[victim].lora,server.app.models[goat].lora
    flat = lambda d: {k: v.detach().clone() for k,v in d.items()}
    return flat(m.params),flat(m.grads),m.step,flat(g.params),g.grads,g.step,sorted(server.app.store.all),sorted(str(p.relative_to(server.folder)) for p in server.folder.rglob('*') if p.is_file()),sorted(server.app.models)

def same(a, b):
    if isinstance(a, dict): return a.keys()==b.keys() and all(torch.equal(a[k], b[k]) for k in a)
    return a==b

def test_malformed_requests(server):
    "No 5xx, no failure of the server's own, no hang, no change; and afterwards everything works."
    sc = tinker.ServiceClient(base_url=server.base_url, api_key=KEY)
    victim,goat = (now(sc.create_lora_training_client(base_model=server.name, rank=2, seed=i)) for i in range(2))
    data = [types.Datum(model_input=text(PROMPT[:-1]), loss_fn_inputs=dict(target_tokens=np.array(PROMPT[1:]), weights=np.ones(len(PROMPT)-1, np.float32)))]
    victim.forward_backward(data, 'cross_entropy').result(); victim.save_state('kept').result()
    sampler = now(sc.create_sampling_client(base_model=server.name)); server.app.body_limit = 2**20
    before,rng = state(server, victim.model_id, goat.model_id),random.Random(SEED); fuzz = Fuzzer(server, victim.model_id, goat.model_id, victim.model_id.split(':')[0], sampler._sampling_session_id, rng)
    bad,counts,began,slowest = [],{},time.monotonic(),(0, None)
    for i in range(N):
        t = time.monotonic(); what,status,out,promise = fuzz.send(); counts[status] = counts.get(status, 0)+1
        slowest = max(slowest, (time.monotonic()-t, f'{i} {str(what)[:300]} -> {status}'))
        if status>=500 or (promise or {}).get('category')=='server': bad.append((i, what, status, out, promise))
    server.app.body_limit = 2**30
    print(f'{N} malformed requests in {time.monotonic()-began:.0f} s, by status: {dict(sorted(counts.items()))}; the slowest took {slowest[0]:.1f} s: {slowest[1]}')
    assert not bad, bad[:5]
    after = state(server, victim.model_id, goat.model_id)
    assert [i for i,(a,b) in enumerate(zip(before, after)) if not same(a, b)]==[]
    victim.optim_step(ADAM).result(); assert victim.forward(data, 'cross_entropy').result().metrics['loss:sum']>0
    sc.close('success').result()

def test_sixteen_clients_of_fifty_requests(server):
    "Every answer is the one to its own request, as the engine alone gives it."
    engine = server.app.backends[server.name].engine
    def request(c, i): return dict(prompt=PROMPT[:3+(c+i)%9]+[40+c], num_samples=1+i%2, max_tokens=3+i%6, temperature=1., seed=1000*c+i)
    def client(c):
        sc = tinker.ServiceClient(base_url=server.base_url, api_key=KEY); s = now(sc.create_sampling_client(base_model=server.name))
        fs = [s.sample(text(r['prompt']), r['num_samples'], params(r['max_tokens'], seed=r['seed'])) for r in (request(c, i) for i in range(50))]
        out = [seqs(f.result()) for f in fs]; sc.close('success').result()
        return out
    with ThreadPoolExecutor(16) as ex: got = list(ex.map(client, range(16)))
    want = engine.sample(engine.snapshot(None), [SampleRequest(**request(c, i)) for c in range(16) for i in range(50)])
    for k,(r,w) in enumerate(zip([a for g in got for a in g], want, strict=True)):
        assert [t for t,_ in r]==[list(map(int, s.tokens)) for s in w.sequences], divmod(k, 50)
        np.testing.assert_array_equal([lp for _,l in r for lp in l], np.concatenate([s.logprobs for s in w.sequences]))
