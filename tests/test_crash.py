"Whatever happens to a run, its rows, weights and decision end up as if nothing had happened. The table that is printed at the end is what durability.ipynb shows."
import copy, dataclasses, json, multiprocessing as mp, os, random, resource, shutil, signal, subprocess, sys, time
from pathlib import Path
import nbformat, pandas as pd, pytest
from safetensors.torch import load_file
import crash_child
from rxnb.budget import spent
from rxnb.records import attempts, completed, is_running, read_rows, study_dir
from rxnb.spec import load_spec
from rxnb.status import read_status
from rxnb.study import decide, execute, notebook, run_arm

slow = pytest.mark.skipif(not os.environ.get('RXNB_SLOW'), reason='set RXNB_SLOW=1, as make test does')
processes = mp.get_context('forkserver')
processes.set_forkserver_preload(['crash_child','rxnb.study','rxnb.decode','tinker','transformers','pyarrow.parquet'])
TABLE = []

def cut(name, as_name=None, **changes):
    "A tiny study cut to five steps of sixteen rollouts, five items and a curve of two."
    raw = copy.deepcopy(load_spec(name).raw)
    raw.update(name=as_name or name, steps=5, pilot_steps=2, batch_size=16, activation_gate=None, curve=dict(split='validation', n_examples=2, every=3), eval=dict(n_examples=5, max_tokens=24, metric='accuracy'))
    raw['sampling'] = dict(raw['sampling'], max_tokens=24)
    for key in ('correctness_preflight','restoration_preflight','generation_audit','feasibility'): raw.pop(key, None)
    raw.update(feasibility_required=False, **changes)
    for a in raw['arms']: a['groups_per_batch'] = 16//a['group_size']
    return raw

STUDIES = {n: cut(n) for n in ('gs1_tiny','tailrl_tiny','centering_tiny')}
STUDIES['critics'] = cut('gs1_tiny', 'critics')
for a,advantage in zip(STUDIES['critics']['arms'][1:], (dict(name='critic', params=dict(lr=1e-3, rank=8, seed=0, updates=1, suffix='Correct? ', yes='1', no='0')), dict(name='ema', params=dict(decay=.9, initial=.5)))):
    a.update(advantage=advantage, lag=dict(kind='fixed', updates=1), group_size=1, groups_per_batch=16)
ARMS = [(n, a['name']) for n,raw in STUDIES.items() for a in raw['arms']]

def start(runs, raw, arm, *args, **kw):
    p = processes.Process(target=crash_child.run, args=(raw, arm, str(runs), str(Path(runs).parent/'log.txt'), *args), kwargs=kw)
    p.start()
    return p

def finish(runs, raw, arm, *args, **kw):
    "Exit status: 0, 1 for an exception, -9 for a process that was killed."
    p = start(runs, raw, arm, *args, **kw); p.join(300)
    assert p.exitcode is not None, 'still running'
    return p.exitcode

def said(runs): return (Path(runs).parent/'log.txt').read_text()

def outcome(runs, raw, arm):
    "All that a run leaves, but for times and for what had to be asked twice: rows, rollouts, items, weights."
    study = load_spec(raw)
    folder,result = completed(study, arm, runs)
    bare = lambda rows: [{k: v for k,v in r.items() if not k.endswith('_s') and k!='retries'} for r in rows]
    sampler, = (study_dir(study, runs)/arm/'.checkpoints').glob(f'{result["sampler_path"].split("/")[2].replace(":","_")}/sampler_weights/*.safetensors')
    assert result['version']==sum(not r['skipped'] for r in read_rows(folder/'steps.jsonl')) # updates: none lost, none twice
    return dict({n: bare(read_rows(folder/f'{n}.jsonl')) for n in ('steps','curve','eval','checkpoints') if (folder/f'{n}.jsonl').exists()}, accuracy={k: v for k,v in result['eval'].items() if k!='n_retried'},
        rollouts=pd.read_parquet(folder/'rollouts.parquet').drop(columns='time_s').to_json(), weights={k: v.numpy().tobytes() for k,v in load_file(sampler).items()})

@pytest.fixture(scope='module')
def whole(tmp_path_factory):
    "What a run leaves that nobody interrupts, by (study, arm); run when it is asked for."
    runs,known = tmp_path_factory.mktemp('whole')/'runs', {}
    def of(name, arm):
        if (name,arm) not in known:
            assert finish(runs, STUDIES[name], arm)==0, said(runs)
            known[name,arm] = outcome(runs, STUDIES[name], arm)
        return known[name,arm]
    of.runs = runs
    return of

@pytest.fixture(scope='module', autouse=True)
def table():
    "Shown at the end, and written to $RXNB_CRASH_TABLE."
    yield
    print('\n' + '\n'.join(f'| {f} | {o} |' for f,o in TABLE))
    if to := os.environ.get('RXNB_CRASH_TABLE'): Path(to).write_text(json.dumps([dict(fault=f, outcome=o) for f,o in TABLE], indent=1)+'\n')

def same(runs, name, arm, whole, but=()):
    left = lambda o: dict(o, steps=[{k: v for k,v in r.items() if k not in but} for r in o['steps']])
    assert left(outcome(runs, STUDIES[name], arm))==left(whole(name, arm))

# Points at which the process is killed, and how often each is passed in a run (a resumed run passes fewer).
POINTS = {'sampling':20, 'loss':4, 'checked':4, 'optimizer':5, 'sampler':5, 'row':9, 'state':2, 'removing':2, 'curve':6, 'eval':5, 'packed':1, 'result':1, 'taking along':3}
EACH = [('tailrl_tiny','grpo_lag4',p,min(n,3)) for p,n in POINTS.items()] + [('critics','gs1_kernel','critic',3)]

def random_kills(n, seed=0):
    "Study, arm, where it is killed and at which occasion, and how often a state is saved."
    rng,points = random.Random(seed),[p for p in POINTS if p!='taking along']
    for i in range(n): yield (*ARMS[i%len(ARMS)], p := rng.choice(points), rng.randint(1, POINTS[p]), rng.choice([1,2,3]))

@pytest.mark.parametrize('name,arm,point,nth', EACH, ids=[e[2] for e in EACH])
def test_killed_at(tmp_path, whole, name, arm, point, nth):
    runs = tmp_path/'runs'
    if point=='taking along': assert finish(runs, STUDIES[name], arm, 'optimizer', 4)==-9
    assert finish(runs, STUDIES[name], arm, point, nth)==-9, said(runs)
    study = load_spec(STUDIES[name])
    assert read_status(study, runs)['arms'][arm]['state']=='failed' and not is_running(study, arm, runs) # nobody says `running` any more
    before = {f: f.read_bytes() for f in (study_dir(study, runs)/arm).glob('attempt_*/*.jsonl')}
    assert finish(runs, STUDIES[name], arm)==0, said(runs)
    same(runs, name, arm, whole)
    tries = attempts(study, arm, runs)
    assert [r['status'] for *_,r in tries]==['failed']*(len(tries)-1)+['succeeded'] and tries[0][2]['cause']=='Killed'
    assert all(f.read_bytes()==b for f,b in before.items() if f.exists() and f.parent!=tries[-1][0]) # an earlier attempt is never changed
    TABLE.append((f'SIGKILL at `{point}`', f'goes on after step {tries[-1][1]["continues"]["step"] if tries[-1][1]["continues"] else 0} of 5; rows, items, weights equal'))

KILLS = list(random_kills(24))
HIT = []

@pytest.mark.parametrize('i', [i if i in (8,14) else pytest.param(i, marks=slow) for i in range(len(KILLS))], ids=lambda i: '-'.join(map(str, KILLS[i])))
def test_killed_anywhere(tmp_path, whole, i):
    "At random points, on every arm of the tiny studies and of one with a critic and a running mean."
    (name,arm,point,nth,every),runs = KILLS[i],tmp_path/'runs'
    code = finish(runs, STUDIES[name], arm, point, nth, every)
    assert code in (0,-9), said(runs) # 0: an arm whose steps had nothing to teach passes the point less often
    assert finish(runs, STUDIES[name], arm, every=every)==0, said(runs)
    same(runs, name, arm, whole)
    if code==-9: HIT.append((name, arm))

@slow
def test_killed_often_enough():
    assert len(HIT)>=20 and len(set(HIT))==len(ARMS)
    TABLE.append((f'SIGKILL at {len(HIT)} random points of {len(set(HIT))} arms', 'rows, items, weights equal in every arm'))

def test_killed_while_deciding(tmp_path, whole):
    name,raw = 'tailrl_tiny',STUDIES['tailrl_tiny']
    for a in raw['arms']: whole(name, a['name'])
    runs = shutil.copytree(whole.runs, tmp_path/'runs')
    decided = decide(load_spec(raw), whole.runs)
    assert finish(runs, raw, None, 'decision')==-9
    assert not (runs/name/'decision.json').exists()
    assert str(decide(load_spec(raw), runs))==str(decided)
    TABLE.append(('SIGKILL while the decision is written', 'no decision.json; decided again, the same'))

@pytest.mark.parametrize('point,nth,cause', [('nan',3,'FloatingPointError'), ('poison',3,''), ('full disk',9,'OSError')])
def test_fails_and_goes_on(tmp_path, whole, point, nth, cause):
    runs,name,arm = tmp_path/'runs','tailrl_tiny','grpo_lag4'
    assert finish(runs, STUDIES[name], arm, point, nth)==1
    study = load_spec(STUDIES[name])
    folder,_,result = attempts(study, arm, runs)[0]
    done = len(read_rows(folder/'steps.jsonl'))
    if point!='full disk': assert result['status']=='failed' and cause in result['cause'] and done==2 # the steps before stay
    else: assert 'No space left on device' in said(runs) and 'could not be written' in said(runs)
    assert finish(runs, STUDIES[name], arm)==0, said(runs)
    same(runs, name, arm, whole, ('loss_sum',) if point=='poison' else ()) # the first steps summed their loss in the client, which is in another order than the endpoint's
    what = {'nan':'NaN loss in step 3', 'poison':'custom loss raises: the SDK client is poisoned', 'full disk':'disk full'}[point]
    TABLE.append((what, f'stops before the optimizer, {done} rows stay; goes on when run again, equal' if point!='full disk' else f'stops, no half row, {done} rows stay; goes on when there is room, equal'))

@pytest.mark.parametrize('point', ['429','clock'])
def test_goes_on_by_itself(tmp_path, whole, point):
    runs,name,arm = tmp_path/'runs','tailrl_tiny','grpo_lag4'
    assert finish(runs, STUDIES[name], arm, point, 2)==0, said(runs)
    same(runs, name, arm, whole)
    study = load_spec(STUDIES[name])
    assert len(attempts(study, arm, runs))==1 and spent(study, runs)[arm]['wall_s']>=0
    TABLE.append({'429':('429 to a fifth of the requests, half of them after the work was done','one attempt, no update twice, equal'), 'clock':('clock jumps back a day','equal; seconds spent are of a clock that nobody sets')}[point])

def test_interrupt_finishes_the_step(tmp_path, whole):
    runs,name,arm = tmp_path/'runs','gs1_tiny','gs1_kernel'
    assert finish(runs, STUDIES[name], arm, 'interrupt', 3, every=0)==1 # a state is saved because of the interrupt alone
    study = load_spec(STUDIES[name])
    folder,_,result = attempts(study, arm, runs)[0]
    assert result['status']=='interrupted' and 'run the same cell or command again' in result['message']
    assert json.loads((folder/'state.json').read_text())['step']==3==len(read_rows(folder/'steps.jsonl'))
    assert finish(runs, STUDIES[name], arm, every=0)==0
    same(runs, name, arm, whole)
    TABLE.append(('Ctrl-C, or the stop button','the step ends and is saved; goes on after it, equal'))

def test_corrupt_last_line(tmp_path, whole):
    runs,name,arm = tmp_path/'runs','gs1_tiny','gs1_kernel'
    assert finish(runs, STUDIES[name], arm, 'optimizer', 4)==-9
    other = shutil.copytree(runs, tmp_path/'other'/'runs')
    for f in runs.glob('*/*/attempt_1/*.jsonl'): f.write_bytes(f.read_bytes()+b'{"step": 3, \x00\xff\n')
    assert finish(runs, STUDIES[name], arm)==0, said(runs)
    same(runs, name, arm, whole)
    f, = other.glob('*/*/attempt_1/steps.jsonl')
    f.write_bytes(b'\n'.join([b'{"st', *f.read_bytes().splitlines()[1:]])+b'\n')
    assert finish(other, STUDIES[name], arm)==1 and 'steps.jsonl: 0 rows can be read' in said(other)
    TABLE.append(('last line corrupt','behind the state: goes on, equal; before it: refused with file and count'))

def test_two_processes_on_one_arm(tmp_path, whole):
    runs,name,arm = tmp_path/'runs','gs1_tiny','gs1_kernel'
    study,first = load_spec(STUDIES[name]),start(runs, STUDIES[name], arm, 'slow')
    while not list(runs.glob('*/*/attempt_1/steps.jsonl')): assert first.is_alive(); time.sleep(.05)
    os.kill(first.pid, signal.SIGSTOP)
    assert finish(runs, STUDIES[name], arm)==1 and 'another process is running' in said(runs)
    assert read_status(study, runs)['arms'][arm]['state']=='running' and len(attempts(study, arm, runs))==1
    os.kill(first.pid, signal.SIGKILL); first.join()
    assert finish(runs, STUDIES[name], arm)==0, said(runs)
    same(runs, name, arm, whole)
    TABLE.append(('two processes on one arm','the second is refused and writes nothing; the lock dies with its holder'))

def test_read_only_runs(tmp_path):
    runs = tmp_path/'runs'; runs.mkdir(mode=0o555)
    code = finish(runs, STUDIES['gs1_tiny'], 'gs1_kernel', uid=65534 if os.geteuid()==0 else None)
    assert code==1 and 'PermissionError' in said(runs) and list(runs.iterdir())==[]
    TABLE.append(('runs/ read-only','PermissionError with the path before anything is trained'))

def test_nothing_to_learn_and_no_prompts_left(tmp_path):
    raw = cut('gs1_tiny', 'mute', sampling=dict(STUDIES['gs1_tiny']['sampling'], max_tokens=1), curve=None)
    for _ in range(2): # and it is no success when it is run again
        with pytest.raises(RuntimeError, match='never stepped'): execute(load_spec(raw), 'grpo_gs8', runs_dir=tmp_path)
    assert completed(load_spec(raw), 'grpo_gs8', tmp_path) is None
    with pytest.raises(ValueError, match='prompts'): execute(load_spec(cut('gs1_tiny', 'long')|dict(steps=10**7)), 'grpo_gs8', runs_dir=tmp_path)
    assert not (tmp_path/'long').exists()
    TABLE.extend([('all groups constant','every step recorded as skipped; failed, no decision'), ('prompts run out','refused before anything is written, with both numbers')])

def test_spec_edited_between_attempts(tmp_path):
    runs,raw = tmp_path/'runs',STUDIES['gs1_tiny']
    assert finish(runs, raw, 'gs1_kernel', 'optimizer', 3)==-9
    edited = copy.deepcopy(raw); edited['arms'][1]['lr'] = 1e-3
    assert finish(runs, edited, 'gs1_kernel')==1
    assert load_spec(raw).sha256 in said(runs) and load_spec(edited).sha256 in said(runs)
    assert len(attempts(load_spec(raw), 'gs1_kernel', runs))==1
    TABLE.append(('spec edited between attempts','refused with both hashes'))

def test_lost_checkpoint(tmp_path):
    runs,raw = tmp_path/'runs',STUDIES['tailrl_tiny']
    assert finish(runs, raw, 'grpo_lag4', 'optimizer', 4)==-9
    ring = json.loads(next(runs.glob('*/*/attempt_1/state.json')).read_text())['samplers']
    name = ring[0][1].rsplit('/',1)[1]
    next(runs.glob(f'*/*/.checkpoints/*/*/{name}.safetensors')).unlink()
    assert finish(runs, raw, 'grpo_lag4')==1 and f'its checkpoint {ring[0][1]} cannot be opened' in said(runs) and 'does not expire' in said(runs)
    assert len(attempts(load_spec(raw), 'grpo_lag4', runs))==1
    TABLE.append(('a sampler of the ring is gone','refused with its path and expiry; no quiet fresh start'))

def server(folder, port=0):
    p = subprocess.Popen([sys.executable,'-m','rxnb.serve','--base-model','tiny_arith','--device','cpu','--port',str(port),'--checkpoint-dir',str(folder)], stdout=subprocess.PIPE, text=True)
    return p,p.stdout.readline().strip()

def server_again(folder, port):
    "The same one at its old port, which the system may give back a moment late."
    patience = time.monotonic()+30
    while not (began := server(folder, port))[1]:
        assert time.monotonic()<patience, f'port {port} is taken'
        began[0].wait(); time.sleep(.5)
    return began

@pytest.mark.parametrize('restarted', [pytest.param(False, marks=slow), True], ids=['down 30 s','restarted'])
def test_endpoint(tmp_path, whole, restarted):
    runs,name,arm = tmp_path/'runs','tailrl_tiny','grpo_lag4'
    p,url = server(tmp_path/'kept')
    try:
        child = start(runs, STUDIES[name], arm, 'slow', base_url=url)
        while not (f := list(runs.glob('*/*/attempt_1/steps.jsonl'))) or len(read_rows(f[0]))<3: assert child.is_alive(), said(runs); time.sleep(.05)
        if restarted: p.kill(); p.wait(); p,_ = server_again(tmp_path/'kept', int(url.rsplit(':',1)[1]))
        else: os.kill(p.pid, signal.SIGSTOP); time.sleep(30); os.kill(p.pid, signal.SIGCONT)
        child.join(240)
        assert child.exitcode==(1 if restarted else 0), said(runs)
        if restarted: assert finish(runs, STUDIES[name], arm, base_url=url)==0, said(runs)
    finally: p.kill(); p.wait()
    study = load_spec(STUDIES[name])
    folder,_ = completed(study, arm, runs)
    bare = lambda rows: [{k: v for k,v in r.items() if not k.endswith('_s') and k!='retries'} for r in rows]
    assert all(bare(read_rows(folder/f'{n}.jsonl'))==whole(name, arm)[n] for n in ('steps','curve','eval'))
    assert len(attempts(study, arm, runs))==1+restarted
    TABLE.append(('endpoint restarted','fails with its answer; goes on from its checkpoint folder, equal') if restarted else ('endpoint silent for 30 s','one attempt, equal'))

@slow
@pytest.mark.parametrize('accident', ['exit','kill'])
def test_notebook(tmp_path, whole, monkeypatch, accident):
    "A cell that exits is no success, and a kernel that is killed leaves rows to go on from."
    import rxnb.study
    runs,name,arm = tmp_path/'runs','gs1_tiny','gs1_kernel'
    spec = tmp_path/'gs1_tiny.json'; spec.write_text(json.dumps(STUDIES[name]))
    monkeypatch.setenv('RXNB_CHECKPOINT_EVERY', '2')
    nb = nbformat.read(notebook('run_arm.ipynb'), 4)
    k = next(i for i,c in enumerate(nb.cells) if 'parameters' in c.metadata.get('tags', []))
    kill = f"import os, threading, time\nfrom pathlib import Path\ndef watch():\n    while not any(len(f.read_bytes().splitlines())>2 for f in Path({str(runs)!r}).glob('*/*/attempt_1/steps.jsonl')): time.sleep(.02)\n    os.kill(os.getpid(), 9)\nthreading.Thread(target=watch, daemon=True).start()"
    nb.cells.insert(k+1, nbformat.v4.new_code_cell('import sys; sys.exit(0)' if accident=='exit' else kill))
    broken = tmp_path/'run_arm.ipynb'; nbformat.write(nb, broken)
    real = rxnb.study.notebook
    monkeypatch.setattr(rxnb.study, 'notebook', lambda n: broken)
    with pytest.raises(Exception): run_arm(str(spec), arm, runs)
    study = load_spec(STUDIES[name])
    assert completed(study, arm, runs) is None
    if accident=='kill': assert attempts(study, arm, runs)[0][2]['status']=='failed' and len(read_rows(attempts(study, arm, runs)[0][0]/'steps.jsonl'))>=2
    monkeypatch.setattr(rxnb.study, 'notebook', real)
    run_arm(str(spec), arm, runs)
    same(runs, name, arm, whole)
    TABLE.append({'exit':('a notebook cell that exits','RuntimeError: nothing was completed'), 'kill':('SIGKILL of the kernel','failed (Killed); goes on from its rows, equal')}[accident])

DOORS = {'run_arm': lambda spec, arm, runs, url: [sys.executable, '-c', 'import sys; from rxnb.study import run_arm; run_arm(*sys.argv[1:4], base_url=sys.argv[4])', spec, arm, runs, url],
    'rxnb study run': lambda spec, arm, runs, url: [sys.executable, '-m', 'rxnb.console', 'study', 'run', spec, '--runs-dir', runs, '--base-url', url],
    'papermill': lambda spec, arm, runs, url: [sys.executable, '-m', 'papermill', str(notebook('run_arm.ipynb')), f'{runs}.ipynb', '--no-progress-bar', *(x for k,v in dict(spec=spec, arm=arm, runs_dir=runs, base_url=url).items() for x in ('-r', k, v))]}
ENDED = {('run_arm',1): 'the step ends and is saved', ('rxnb study run',1): 'the step ends and is saved', ('rxnb study run',2): 'ends at once; steps since the last state are run again',
    ('papermill',1): 'ends after 5 s; steps since the last state are run again'}

@slow
@pytest.mark.parametrize('door,times', ENDED, ids=lambda x: str(x))
def test_interrupted_at_the_door(tmp_path, whole, door, times):
    "A real Ctrl-C while a step takes longer than Jupyter waits for a kernel: its endpoint is silent for eight seconds."
    runs,name,arm = tmp_path/'runs','gs1_tiny','grpo_gs8'
    runs.mkdir()
    spec = tmp_path/f'{name}.json'; spec.write_text(json.dumps(STUDIES[name]))
    study,rows = load_spec(STUDIES[name]),lambda: [r for f in runs.glob(f'*/{arm}/attempt_1/steps.jsonl') for r in read_rows(f)]
    p,url = server(tmp_path/'kept')
    with open(tmp_path/'log.txt', 'w') as out: child = subprocess.Popen(DOORS[door](*map(str, (spec, arm, runs, url))), stdout=out, stderr=out, cwd=tmp_path, env=dict(os.environ, RXNB_CHECKPOINT_EVERY='2' if times==2 or door=='papermill' else '0'), start_new_session=True, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)) # a shell's background job ignores it
    try:
        while len(rows())<3: assert child.poll() is None, said(runs); time.sleep(.02)
        os.kill(p.pid, signal.SIGSTOP); time.sleep(1); before = len(rows()) # an answer that was on its way has become a row
        for _ in range(times): child.send_signal(signal.SIGINT); time.sleep(1)
        if ENDED[door,times].startswith('ends'): # while the endpoint is still silent
            child.wait(120); patience = time.monotonic()+60
            while is_running(study, arm, runs): assert time.monotonic()<patience, said(runs); time.sleep(.1) # a kernel looks every second whether its parent is there
        else:
            time.sleep(7)
            assert child.poll() is None and 'stopping when this step is done and saved' in said(runs), said(runs)
        os.kill(p.pid, signal.SIGCONT)
        assert child.wait(120)!=0
        after = len(rows())
        if ENDED[door,times].startswith('ends'): assert after==before, said(runs)
        else:
            folder,_,result = attempts(study, arm, runs)[0]
            assert result['status']=='interrupted' and before<=after<=before+1 and json.loads((folder/'state.json').read_text())['step']==after
            assert 'run the same cell or command again' in said(runs) and said(runs).count('stopping when')<=2
        assert not is_running(study, arm, runs)
        assert finish(runs, STUDIES[name], arm, base_url=url)==0, said(runs)
    finally: p.kill(); p.wait()
    folder,_ = completed(study, arm, runs)
    bare = lambda rows: [{k: v for k,v in r.items() if not k.endswith('_s') and k!='retries'} for r in rows]
    assert all(bare(read_rows(folder/f'{n}.jsonl'))==whole(name, arm)[n] for n in ('steps','curve','eval'))
    TABLE.append((f'Ctrl-C{", twice," if times==2 else ""} at `{door}` while a step takes 8 s', f'{ENDED[door,times]}; goes on when run again, equal'))
