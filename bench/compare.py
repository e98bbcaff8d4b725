"Our loop and TRL's in turn (A B A B) on the same work; what came out goes to nbs/results/benchmarks/peer.json, a case a key."
import argparse, json, os, platform, statistics, subprocess, sys
from pathlib import Path

CASES = {'cpu 2m': ['--size', '2m', '--threads', '2'],
         'cpu 135m': ['--size', '135m', '--threads', '2', '--prompts', '2', '--group', '4', '--tokens', '32'],
         'gpu 600m': ['--size', '600m', '--device', 'cuda', '--prompts', '16', '--tokens', '256', '--prompt-tokens', '128']}
here = Path(__file__).parent; target = here.parent/'nbs/results/benchmarks/peer.json'

p = argparse.ArgumentParser(description=__doc__)
p.add_argument('cases', nargs='*', help=f'of {", ".join(CASES)}; none: those of this machine')
p.add_argument('--steps', type=int, default=5, help='timed steps of a run; each side has two runs')
p.add_argument('--peer-python', default=here.parent/'.venv-trl/bin/python')
p.add_argument('--out', type=Path, default=target)
p.add_argument('--peer-ways', default='plain', help='plain,continuous')
a = p.parse_args()

def run(python, script, *args):
    "The last line of a script's output, with the load that it met."
    before = os.getloadavg()[0]
    r = subprocess.run([python, here/script, '--steps', str(a.steps), *args], capture_output=True, text=True, env=dict(os.environ, PYTHONPATH=str(here.parent) if script=='step.py' else os.environ.get('PEER_PYTHONPATH', '')))
    lines = [l for l in r.stdout.splitlines() if l.startswith('{"side"')]
    if not lines: raise SystemExit(f'{script} gave nothing:\n{r.stderr[-3000:]}')
    return dict(json.loads(lines[-1]), load=(before, os.getloadavg()[0]))

def machine():
    try: import torch; gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    except ImportError: gpu = None
    return gpu or f'{platform.machine()}, {os.cpu_count()} cores shared with others'

found = json.loads(a.out.read_text()) if a.out.exists() else {}
for case in a.cases or [c for c in CASES if c.startswith('cpu')]:
    runs = []
    for turn in range(2):
        runs.append(run(sys.executable, 'step.py', *CASES[case]))
        for way in a.peer_ways.split(','): runs.append(dict(run(a.peer_python, 'peer_trl.py', *CASES[case], *(['--continuous'] if way=='continuous' else [])), way=way))
        print(case, [(r['side'], r.get('way', ''), round(r['step_s'], 3), round(r['sample_s'], 3)) for r in runs], flush=True)
    med = lambda rs, k: statistics.median(sum((r[k] for r in rs), []))
    ours, ways = [r for r in runs if r['side']=='rxnb'], {w:[r for r in runs if r.get('way')==w] for w in a.peer_ways.split(',')}
    best = min(ways, key=lambda w: med(ways[w], 'steps_s'))
    found[case] = dict(machine=machine(), step_s=med(ours, 'steps_s'), peer_step_s=med(ways[best], 'steps_s'), peer_way=best, runs=runs)
    found[case]['ratio'] = found[case]['peer_step_s']/found[case]['step_s']
    a.out.parent.mkdir(parents=True, exist_ok=True); a.out.write_text(json.dumps(found, indent=1)+'\n')
    print(case, round(found[case]['ratio'], 2))
