"""Other people's clients: recipes of the unmodified tinker-cookbook, in its own environment, against the real server.
`python tests/test_cookbook.py FILE` runs them and writes what they took to FILE."""
import json, math, os, subprocess, sys, time
from contextlib import contextmanager
from pathlib import Path
import pytest

root = Path(__file__).parents[1]
MODEL = root/'rxnb/models/tiny_arith'
# A group whose rewards are all alike moves nothing. Twelve tokens cut a part of the rollouts off, which is part of the reward, so that among eight groups of sixteen some are always mixed.
RL = ('env=arithmetic', f'model_name={MODEL}', 'renderer_name=qwen3_instruct', 'max_steps=3', 'group_size=16', 'groups_per_batch=8', 'max_tokens=12', 'lora_rank=8',
      'learning_rate=1e-4', 'loss_fn=importance_sampling', 'eval_every=0', 'save_every=2', 'behavior_if_log_dir_exists=delete')
RECIPES = dict(rl_sync=('-m', 'tinker_cookbook.recipes.math_rl.train', *RL), rl_async=('-m', 'tinker_cookbook.recipes.math_rl.train', *RL, 'max_steps_off_policy=1'),
    supervised=(root/'tests/cookbook_sl.py',))

SLOW = dict(rl_sync=0, rl_async=2, supervised=0)   # seconds that a training pass takes longer: the next rollouts are asked for meanwhile

def python():
    py = Path(os.environ.get('RXNB_COOKBOOK_PYTHON') or root/'.venv-cookbook/bin/python')
    if not py.exists(): raise FileNotFoundError(f'there is no {py}: make .venv-cookbook, or set RXNB_COOKBOOK_PYTHON to a Python that has tinker-cookbook')
    return py

def run(recipe, base_url, log):
    "A recipe as its users start it; its rows of metrics."
    env = {k: v for k,v in os.environ.items() if k!='PYTHONPATH'} | dict(TINKER_API_KEY='tml-local', TINKER_TELEMETRY='0', OMP_NUM_THREADS='1', HF_HUB_OFFLINE='1', TOKENIZERS_PARALLELISM='false')
    where = (base_url, MODEL, log) if recipe=='supervised' else (f'base_url={base_url}', f'log_path={log}')
    began = time.perf_counter()
    r = subprocess.run([python(), *map(str, RECIPES[recipe]+where)], env=env, cwd=root, capture_output=True, text=True, timeout=1000)
    assert r.returncode==0, r.stderr[-4000:]
    rows = [json.loads(l) for l in (log/'metrics.jsonl').read_text().splitlines()]
    return rows,time.perf_counter()-began

@contextmanager
def server(training_s=0):
    "The embedded backend; `training_s`: what a forward and backward pass takes longer."
    from rxnb.serve import serve
    with serve(MODEL, device='cpu') as s:
        for b in s.app.backends.values():
            def slow(*args, train=b.engine.forward_backward, **kw): time.sleep(training_s); return train(*args, **kw)
            if training_s: b.engine.forward_backward = slow
        yield s

@pytest.fixture(scope='module')
def base_url():
    with server() as s: yield s.base_url

def step_s(rows): return [round(r.get('time/total', r.get('time/step')), 3) for r in rows if 'time/total' in r or 'time/step' in r]

@pytest.mark.slow
@pytest.mark.parametrize('recipe', ['rl_sync', 'rl_async'])
def test_rl_recipe(recipe, tmp_path):
    "The cookbook's own metrics say that sampler and trainer are one model, on policy and one step behind. Training takes long enough for its workers to ask for the next rollouts meanwhile."
    try:
        with server(SLOW[recipe]) as s: rows,wall = run(recipe, s.base_url, tmp_path/'log')
    except FileNotFoundError as e: pytest.fail(str(e))
    print(f'{recipe}: steps of {step_s(rows)} s, {wall:.0f} s in all')
    assert len(rows)>=2 and all(r['env/all/total_episodes']==128 and 0<r['unclipped_grad_l2:mean']<math.inf for r in rows), rows
    kl = [r['optim/kl_sample_train_v2'] for r in rows]   # half the mean squared difference of log-probabilities: nothing cancels
    if recipe=='rl_sync': assert len(rows)==3 and max(kl)<1e-9
    else:
        behind = [r['training_client/step']-r['sampling_client/step_min'] for r in rows]
        assert behind[0]==0 and max(behind)==1 and all((1e-6<k<.1) if b else k<1e-9 for b,k in zip(behind, kl)), (behind, kl)
    saved = [json.loads(l) for l in (tmp_path/'log/checkpoints.jsonl').read_text().splitlines()]
    assert saved[-1]['state_path'].endswith('/weights/final') and saved[-1]['sampler_path'].endswith('/sampler_weights/final')

@pytest.mark.slow
def test_supervised_loop(base_url, tmp_path):
    "Eight steps on forty sums: what is taught gets likelier."
    try: rows,wall = run('supervised', base_url, tmp_path/'log')
    except FileNotFoundError as e: pytest.fail(str(e))
    nll = [r['train_mean_nll'] for r in rows if 'train_mean_nll' in r]
    print(f'supervised: steps of {step_s(rows)} s, {wall:.0f} s in all, loss {nll[0]:.3f} to {nll[-1]:.3f} nats a token')
    assert len(nll)==8 and nll[-1]<.7*nll[0]

def record(file):
    "Run every recipe and keep what it took."
    import platform, tempfile, tinker
    version = subprocess.run([python(), '-c', 'import tinker_cookbook as c, tinker as t, transformers as r; print(c.__version__, t.__version__, r.__version__)'], capture_output=True, text=True).stdout.split()
    out = dict(zip(('tinker_cookbook','tinker','transformers'), version), model='tiny_arith', machine=f'{os.cpu_count()} CPU cores, {platform.machine()}, one thread', recipes={})
    with server() as s, tempfile.TemporaryDirectory() as d:
        for name in RECIPES:
            rows,wall = run(name, s.base_url, Path(d)/name)
            out['recipes'][name] = dict(steps=len(rows), step_s=step_s(rows), wall_s=round(wall, 1))
    Path(file).write_text(json.dumps(out, indent=1)+'\n')

if __name__=='__main__': record(sys.argv[1])
