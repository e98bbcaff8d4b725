"""What records, gates and plots take of a step of the packaged model: arms of gs1_tiny by the ordinary `rxnb.study.execute`, timed from outside.

A part is timed without what it calls of another part. The share is that of seconds beside sampling and training in the whole step on the wall, held-out grading and saved states left out."""
import argparse, inspect, json, os, platform, statistics, tempfile, time
from collections import Counter
from pathlib import Path
from shapes import machine
os.environ.setdefault('OMP_NUM_THREADS', '1'); os.environ.update(TINKER_TELEMETRY='0', TOKENIZERS_PARALLELISM='false')

here = Path(__file__).resolve().parents[1]; target = here/'nbs/results/benchmarks/share.json'
p = argparse.ArgumentParser(description=__doc__)
p.add_argument('--steps', type=int, default=40, help='of an arm; gs1_tiny registers 40')
p.add_argument('--arms', default='grpo_gs8,gs1_kernel', help='with commas')
p.add_argument('--out', type=Path, default=target)
a = p.parse_args(); before = os.getloadavg()
os.environ['MATPLOTLIBRC'] = str(here/'nbs')   # as in JupyterLab

import pandas as pd
import torch
from IPython.core.pylabtools import print_figure
from rxnb import plots, records, resume, study as loop, train as steps
from rxnb.gates import Evidence, Pilot, evaluate_gates
from rxnb.spec import load_spec

class Clock:
    "Seconds by what they were spent for; what a part calls of another one counts there."
    def __init__(self): self.s,self.inside = Counter(),[]
    def __call__(self, part, f):
        def timed(*args, **kw):
            began = time.perf_counter(); self.inside.append(0.)
            try: return f(*args, **kw)
            finally:
                took = time.perf_counter()-began; self.s[part] += took-self.inside.pop()
                if self.inside: self.inside[-1] += took
        return timed

PARTS = {'rows': [(records.Attempt, 'append'), (steps, 'rollout_rows')], 'status': [(loop, 'update_status')], 'progress': [(loop, 'progress_line')],
    'diagnostics': [(steps, 'reward_stats'), (steps, 'checked_loss'), (steps, 'no_gradient_frac')],
    'advantages': [(steps, 'judge_step')], 'states': [(resume.Keeper, 'save')], 'first sampler': [(steps, 'begin')]}
OURS = ('rows', 'status', 'progress', 'diagnostics', 'advantages')

def one_arm(study, arm, runs):
    "Seconds a step of each part, while `train` runs."
    clock,old,found = Clock(),[],{}
    def alone(f):
        def timed(*args, **kw):
            clock.s.clear(); began = time.perf_counter()
            try: return f(*args, **kw)
            finally: found.update(clock.s, wall=time.perf_counter()-began)
        return timed
    for part,owners in PARTS.items():
        for owner,name in owners: old.append((owner, name, getattr(owner, name))); setattr(owner, name, clock(part, getattr(owner, name)))
    old.append((loop, 'train', loop.train)); loop.train = alone(loop.train)
    try: loop.execute(study, arm, runs_dir=runs)
    finally:
        for owner,name,f in reversed(old): setattr(owner, name, f)
    found['step'] = found.pop('wall')-found.pop('states')-found.pop('first sampler')
    return {k: v/study.spec.steps for k,v in found.items()}

def took(f, n=3):
    "Seconds of each of `n` calls."
    out = []
    for _ in range(n): began = time.perf_counter(); f(); out.append(time.perf_counter()-began)
    return out

raw = dict(load_spec('gs1_tiny').raw, name='share', steps=a.steps, curve=None)
raw['eval'] = dict(raw['eval'], n_examples=64)   # graded after the last step
study,runs = load_spec(raw),Path(tempfile.mkdtemp())
arms = {arm: one_arm(study, arm, runs) for arm in a.arms.split(',')}

def as_pilot(arm):
    "The rows of an arm as the gates read those of a pilot."
    folder = records.completed(study, arm, runs)[0]
    return Pilot(study.arm(arm), records.read_rows(folder/'steps.jsonl'), pd.read_parquet(folder/'rollouts.parquet').to_dict('records'), json.loads((folder/'manifest.json').read_text()), arm)
checks = load_spec('gs1_kernel').spec.activation_gate.checks
gates = took(lambda: evaluate_gates(checks, Evidence(study.spec.roles, {arm: as_pilot(arm) for arm in arms}, train_prefix='')))
draw = took(lambda: print_figure(plots.plot_training(records.load(study, runs), [x.name for x in study.arms], study.name), 'png', bbox_inches='tight'))
look = took(lambda: print_figure(plots.plot_panels(*plots.live_frames(runs/study.name)[:2], title=study.name), 'png', bbox_inches='tight'))

s = {arm: dict(step_s=x['step'], **{f'{k.replace(" ", "_")}_s': v for k,v in x.items() if k!='step'}, gates_s=gates[0]/a.steps, plot_s=draw[0]/a.steps) for arm,x in arms.items()}
for x in s.values(): x['share'] = (sum(x[f'{k}_s'] for k in OURS)+x['gates_s']+x['plot_s'])/(x['step_s']+x['gates_s']+x['plot_s'])
of_watch = {k: v.default for k,v in inspect.signature(plots.watch).parameters.items()}
interval = max(of_watch['every_s'], statistics.median(look)/of_watch['share'])
out = dict(machine=machine(), load=(before, os.getloadavg()), threads=torch.get_num_threads(), python=platform.python_version(), torch=torch.__version__,
    work=f'tiny_arith, 64 rollouts a step, {a.steps} steps', arms=s, gates_s=gates, plot_s=draw, watch=dict(redraw_s=look, every_s=interval, share=statistics.median(look)/interval))
a.out.parent.mkdir(parents=True, exist_ok=True); a.out.write_text(json.dumps(out, indent=1)+'\n')
for arm,x in s.items(): print(arm, f'{x["share"]:.1%} of {x["step_s"]:.2f} s:', ', '.join(f'{k[:-2]} {1e3*v:.1f} ms' for k,v in x.items() if k.endswith('_s') and k!='step_s'), flush=True)
print(f'watch: {statistics.median(look):.2f} s a look, every {interval:.1f} s')
