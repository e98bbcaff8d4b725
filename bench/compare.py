"Our loop and TRL's on the same work, a step each in turn (A B A B …); what came out goes to nbs/results/benchmarks/peer.json, a case a key."
import argparse, json, os, subprocess, sys
from pathlib import Path
from shapes import machine

CASES = {'cpu 2m': ['--size', '2m', '--threads', '2'],
         'cpu 135m': ['--size', '135m', '--threads', '2', '--prompts', '2', '--group', '4', '--tokens', '32'],
         'gpu 600m': ['--size', '600m', '--device', 'cuda', '--prompts', '16', '--tokens', '256', '--prompt-tokens', '128']}
here = Path(__file__).parent; target = here.parent/'nbs/results/benchmarks/peer.json'

p = argparse.ArgumentParser(description=__doc__)
p.add_argument('cases', nargs='*', help=f'of {", ".join(CASES)}; none: those of this machine')
p.add_argument('--steps', type=int, default=10, help='timed steps of each side')
p.add_argument('--warmup', type=int, default=2)
p.add_argument('--peer-python', default=here.parent/'.venv-trl/bin/python')
p.add_argument('--out', type=Path, default=target)
p.add_argument('--peer-ways', default='plain', help='plain,continuous')
a = p.parse_args()

def start(python, script, *args):
    "A side of the comparison, waiting for its turn."
    path = os.pathsep.join(filter(None, [str(here.parent), os.environ.get('PYTHONPATH')])) if script=='step.py' else os.environ.get('PEER_PYTHONPATH', '')
    return subprocess.Popen([python, here/script, '--steps', str(a.steps), '--warmup', str(a.warmup), *args], text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=dict(os.environ, PYTHONPATH=path, BENCH_TURNS='1'))

def until(side, *heads):
    "The next line of a side that begins with one of `heads`."
    for l in side.stdout:
        if l.startswith(heads): return l
    raise SystemExit(f'{side.args[1].name} ended without a result: run it alone to see why')

def in_turn(sides):
    "Their results: nobody works while it is another's turn."
    for s in sides: until(s, 'ready')
    lines = [None]*len(sides)
    while None in lines:
        for i,s in enumerate(sides):
            if lines[i] is None: s.stdin.write('go\n'); s.stdin.flush(); l = until(s, 'ready', '{"side"'); lines[i] = l if l[0]=='{' else None
    return [json.loads(l) for l in lines]

found = json.loads(a.out.read_text()) if a.out.exists() else {}
for case in a.cases or [c for c in CASES if c.startswith('cpu')]:
    ways, before = a.peer_ways.split(','), os.getloadavg()
    ours,*peers = in_turn([start(sys.executable, 'step.py', *CASES[case]), *[start(a.peer_python, 'peer_trl.py', *CASES[case], *(['--continuous'] if w=='continuous' else [])) for w in ways]])
    best = min(range(len(ways)), key=lambda i: peers[i]['step_s'])
    found[case] = dict(machine=machine(), load=(before, os.getloadavg()), step_s=ours['step_s'], peer_step_s=peers[best]['step_s'], peer_way=ways[best], ours=ours, peers=dict(zip(ways, peers)))
    found[case] |= dict(ratio=found[case]['peer_step_s']/found[case]['step_s'], cpu_ratio=peers[best]['cpu_s']/ours['cpu_s'])
    a.out.parent.mkdir(parents=True, exist_ok=True); a.out.write_text(json.dumps(found, indent=1)+'\n')
    print(case, {k: round(found[case][k], 2) for k in ('step_s', 'peer_step_s', 'ratio', 'cpu_ratio')}, flush=True)
