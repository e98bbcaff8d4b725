"A process that runs one arm and meets with an accident: what `test_crash` starts, kills and starts again."
import os, signal, sys, time
from itertools import count
from pathlib import Path

def die(): os.kill(os.getpid(), signal.SIGKILL)

def at(nth, act):
    "A function to call at every occasion; at the nth (from 1) it acts."
    n = count(1)
    return lambda: act() if next(n)==nth else None

def before(owner, name, hit):
    "Call `hit` before a function."
    real = getattr(owner, name)
    def f(*a, **k): hit(); return real(*a, **k)
    setattr(owner, name, f)

def after(owner, name, hit):
    real = getattr(owner, name)
    def f(*a, **k): out = real(*a, **k); hit(); return out
    setattr(owner, name, f)

def half_written(nth):
    "The nth append gets half its bytes to the disk."
    from rxnb import records
    n,real = count(1),records.append_rows
    def f(path, rows):
        if next(n)<nth: return real(path, rows)
        lines = ''.join(records.row_line(r)+'\n' for r in rows).encode()
        with open(path, 'ab', buffering=0) as h: h.write(lines[:len(lines)//2])
        die()
    records.append_rows = f

def half_json(owner, name, nth):
    "The nth write of a JSON file of that name gets half its bytes beside it."
    n,real = count(1),owner.write_json
    def f(path, obj):
        if Path(path).name!=name or next(n)<nth: return real(path, obj)
        Path(f'{path}.{os.getpid()}.part').write_text('{"half": ')
        die()
    owner.write_json = f

def grading(name, nth):
    "Killed when the nth batch of items of one kind has its rows."
    from rxnb import records
    n,real = count(1),records.Attempt.append
    def f(self, kind, rows):
        real(self, kind, rows)
        if kind==name and next(n)==nth: die()
    records.Attempt.append = f

def one_by_one():
    "Items are graded one at a time, so that an evaluation can end between any two."
    import rxnb.evaluate
    rxnb.evaluate.IN_FLIGHT = 1

def nan(nth):
    import numpy as np
    from rxnb import train
    n,real = count(1),train.submit_loss
    def f(*a):
        future,bad = real(*a),next(n)==nth
        class Sent:
            def result(self):
                out = future.result()
                if bad: out.metrics['loss:sum'] = np.nan
                return out
        return Sent()
    train.submit_loss = f

def poison(nth):
    "The custom loss raises inside the SDK, in the backward pass that it drives, at an endpoint that runs no loss itself."
    from rxnb import train
    train.uploaded = lambda *a: None
    n,real = count(1),train.torch_loss
    def f(*a, **k):
        loss,bad = real(*a, **k),next(n)==nth
        def wrapped(data, logps):
            if bad and not getattr(wrapped, 'dry', True): raise ZeroDivisionError('on purpose')
            wrapped.dry = False # the dry run comes first
            return loss(data, logps)
        wrapped.dry = True
        return wrapped
    train.torch_loss = f

def full_disk(nth):
    from rxnb import records
    real,n = os.fsync,count(1)
    def f(fd):
        if next(n)>=nth: raise OSError(28, 'No space left on device')
        return real(fd)
    records.os = type('os', (), dict(vars(os), fsync=staticmethod(f)))

def storm(share=.2):
    "The endpoint answers 429 to a share of all requests, some of them after it has done what was asked."
    import json, random
    from rxnb.serve import App
    rng,real = random.Random(0),App.__call__
    async def f(self, scope, receive, send):
        u = rng.random()
        if u>share or 'healthz' in scope['path'] or 'session' in scope['path']: return await real(self, scope, receive, send)
        async def drop(message): pass
        if u<share/2: await real(self, scope, receive, drop)
        await send(dict(type='http.response.start', status=429, headers=[(b'content-type', b'application/json'), (b'retry-after', b'0')]))
        await send(dict(type='http.response.body', body=json.dumps(dict(detail='too many requests')).encode()))
    App.__call__ = f

def clock_back(nth):
    from rxnb import study
    real,shift = time.time,[0.]
    time.time = lambda: real()+shift[0]
    def back(): shift[0] = -86400.
    after(study, 'progress_line', at(nth, back))

def install(point, nth):
    import tinker
    from rxnb import budget, records, resume, study, train
    hit = at(nth, die)
    {'sampling': lambda: after(tinker.SamplingClient, 'sample', hit), 'loss': lambda: before(train, 'checked_loss', hit), 'checked': lambda: after(train, 'checked_loss', hit),
     'optimizer': lambda: before(resume.Keeper, 'sampler', hit), 'sampler': lambda: after(resume.Keeper, 'sampler', hit), 'critic': lambda: after(train, 'teach_critic', hit), 'row': lambda: half_written(nth),
     'state': lambda: half_json(resume, 'state.json', nth), 'removing': lambda: before(resume, 'ask_removal', hit), 'step': lambda: after(study, 'progress_line', hit), 'curve': lambda: grading('curve', nth), 'eval': lambda: grading('eval', nth),
     'packed': lambda: after(records, 'pack_rollouts', hit), 'result': lambda: half_json(records, 'result.json', nth), 'taking along': lambda: after(resume, 'append_rows', hit),
     'decision': lambda: half_json(study, 'decision.json', nth), 'nan': lambda: nan(nth), 'poison': lambda: poison(nth), 'full disk': lambda: full_disk(nth), '429': storm, 'clock': lambda: clock_back(nth),
     'interrupt': lambda: after(study, 'progress_line', at(nth, lambda: signal.raise_signal(signal.SIGINT))), 'slow': lambda: after(study, 'progress_line', lambda: time.sleep(.3)), None: lambda: None}[point]()

def run(raw, arm, runs, log, point=None, nth=1, every=2, base_url=None, uid=None):
    "One process: run an arm, or decide where there is none."
    with open(log, 'a') as f: os.dup2(f.fileno(), 1); os.dup2(f.fileno(), 2)
    from rxnb.spec import load_spec
    from rxnb.study import decide, execute
    one_by_one(); install(point, nth)
    if uid: os.seteuid(uid)
    if arm is None: decide(load_spec(raw), runs)
    else: execute(load_spec(raw), arm, runs_dir=runs, save_every=every, base_url=base_url)
