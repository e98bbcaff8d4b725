"""Routes × SDK versions: what each SDK asks for, and what the server answers.
`python tests/test_routes.py FILE` writes the table to FILE."""
import json, os, re, subprocess, sys
from pathlib import Path
os.environ['OMP_NUM_THREADS'] = '1'
import pytest

root = Path(__file__).parents[1]
sys.path.insert(0, str(root))
RESULT = root/'nbs/results/endpoint/routes.json'
# What a hosted account has and a server on your machine has not: accounts, bills, projects, publishing.
HOSTED = ('audit', 'auth/token', 'billing/usage/events', 'billing/usage/checkpoints/current', 'sessions/search', 'sessions/{}/project', 'sessions/{}/trace_export',
    'training_runs/{}/checkpoints/{}/publish', 'training_runs/{}/checkpoints/{}/archive')

def pythons():
    old = Path(os.environ.get('RXNB_SDK33_PYTHON') or root/'.venv-sdk33/bin/python')
    if not old.exists(): raise FileNotFoundError(f'there is no {old}: make .venv-sdk33, or set RXNB_SDK33_PYTHON to a Python that has tinker 0.33.0 and torch')
    return sys.executable,old

def asked(py):
    "Paths below /api/v1/ in the source of an SDK, without those of its command line."
    code = '''if True:
        import re, tinker
        from pathlib import Path
        folder = Path(tinker.__file__).parent; print(tinker.__version__)
        for f in folder.rglob('*.py'):
            if 'test' in f.name or 'cli' in f.relative_to(folder).parts: continue
            for p in re.findall(r"""["']/api/v1/([^"'?]*)""", f.read_text()): print(re.sub(r'{[^}]*}', '{}', p))'''
    version,*paths = subprocess.run([py, '-c', code], capture_output=True, text=True, check=True).stdout.split()
    return version,sorted(set(paths))

def recorded(py, folder):
    "Run every call of an SDK against a server that takes note; {(method, pattern): statuses}."
    from rxnb import serve as S
    from rxnb.engine import Engine, random_model
    import rxnb.decode
    seen = {}
    class Noting(S.App):
        async def respond(self, q):
            out = await super().respond(q)
            for m,p,_ in self.routes:
                if m==q.method and p.fullmatch(q.path): seen.setdefault((m, p.pattern), set()).add(out[0]); break
            else: seen.setdefault((q.method, q.path), set()).add(out[0])
            return out
    app = Noting([S.Backend('tiny', Engine(random_model('qwen3', folder), device='cpu'))])
    with S.Server(app) as s:
        r = subprocess.run([py, root/'tests/wire_routes.py', s.base_url, 'tiny'], capture_output=True, text=True, timeout=300, env={k: v for k,v in os.environ.items() if k!='PYTHONPATH'})
    assert r.returncode==0, r.stderr[-4000:]
    return json.loads(r.stdout.splitlines()[-1])['sdk'],seen

def shape(path): return re.sub(r'\((?:[^()]|\([^()]*\))*\)', '{}', path)

def table(folder):
    from rxnb import serve as S
    before,S.CLIENT_CONFIG = S.CLIENT_CONFIG,dict(S.CLIENT_CONFIG, sample_use_retrieve_futures=True, sample_join_sampling_session=True)
    try: runs = dict(recorded(py, Path(folder)/str(i)) for i,py in enumerate(pythons()))
    finally: S.CLIENT_CONFIG = before
    sources = dict(asked(py) for py in pythons())
    rows = []
    for method,pattern,_ in S.App.routes:
        rows.append(dict(route=f'{method} {shape(pattern.pattern)}', **{v: 'answered' if any(x<300 for x in seen.get((method, pattern.pattern), ())) else 'not asked' for v,seen in runs.items()}))
    offered = {shape(p.pattern) for _,p,_ in S.App.routes} | {'training_runs/{}/checkpoints/{}'.replace('/{}', '/{}/{}', 2)}
    known = {r.replace('/checkpoints/{}/{}', '/checkpoints/{}').replace('external_weights/{}/', '{}/') for r in offered}
    missing = sorted({p for paths in sources.values() for p in paths if p not in known and p not in offered})
    odd = sorted({f'{m} {p}' for seen in runs.values() for (m, p),st in seen.items() if not any(pp.pattern==p for _,pp,_ in S.App.routes)})
    return dict(rows=rows, not_offered=missing, asked_in_vain=odd)

@pytest.fixture(scope='module')
def made(tmp_path_factory):
    try: return table(tmp_path_factory.mktemp('routes'))
    except FileNotFoundError as e: pytest.fail(str(e))

def test_every_route_answers_both_sdks(made):
    silent = {r['route']: [v for v in r if v!='route' and r[v]!='answered'] for r in made['rows']}
    # no method of these SDKs asks for these: other tests do
    assert {k for k,v in silent.items() if v}<={'POST unload_model', 'GET healthz', 'POST copy_weights', 'POST create_custom_loss'}, silent
    assert not made['asked_in_vain']

def test_what_is_not_offered_is_known(made): assert set(made['not_offered'])<=set(HOSTED)

def test_the_table_is_current(made): assert json.loads(RESULT.read_text())==made

if __name__=='__main__':
    import tempfile
    with tempfile.TemporaryDirectory() as d: out = table(d)
    Path(sys.argv[1]).parent.mkdir(parents=True, exist_ok=True); Path(sys.argv[1]).write_text(json.dumps(out, indent=1)+'\n')
