"`rxnb study run` in a process of its own, from a spec on the disk to the report."
import configparser, importlib, json, subprocess, sys
from pathlib import Path
import pytest
from rxnb.spec import load_spec

root = Path(__file__).parents[1]

def small(folder, **changes):
    "Two arms, two steps, 32 items."
    raw = json.loads(json.dumps(load_spec('gs1_tiny').raw))
    raw.update(name='small', arms=raw['arms'][:2], steps=2, curve=None, **changes)
    raw['eval']['n_examples'] = 32
    (folder/'small.json').write_text(json.dumps(raw))
    return folder/'small.json'

def rxnb(*argv, cwd):
    return subprocess.run([sys.executable, '-m', 'rxnb.console', 'study', *argv], cwd=cwd, capture_output=True, text=True, timeout=500)

def test_run_ends_with_a_report(tmp_path):
    spec = small(tmp_path)
    r = rxnb('run', str(spec), '--runs-dir', 'runs', cwd=tmp_path)
    assert r.returncode==0, r.stdout+r.stderr
    page = tmp_path/'runs/small/report.html'
    assert 'inconclusive: gs1_kernel − grpo_gs8' in r.stdout and 'gs1_kernel' in r.stdout and page.exists()
    assert json.loads((tmp_path/'runs/small/decision.json').read_text())['n']==32

def test_arms_side_by_side(tmp_path):
    "Two processes of a device each leave the rows of one process."
    spec,rows = small(tmp_path),{}
    for runs,more in (('one', ()), ('two', ('--devices', 'cpu,cpu'))):
        r = rxnb('run', str(spec), '--runs-dir', runs, *more, cwd=tmp_path)
        assert r.returncode==0, r.stdout+r.stderr
        rows[runs] = [[{k: v for k,v in json.loads(l).items() if not k.endswith('_s')} for l in f.read_text().splitlines()] for f in sorted((tmp_path/runs/'small').glob('*/attempt_1/eval.jsonl'))]
    assert len(rows['one'])==2 and rows['one']==rows['two']

def test_a_run_that_fails_says_so(tmp_path):
    (tmp_path/'no_weights').mkdir(); (tmp_path/'no_weights/config.json').write_text('{}')
    spec = small(tmp_path, base_model=str(tmp_path/'no_weights'))
    r = rxnb('run', str(spec), '--runs-dir', 'runs', cwd=tmp_path)
    assert r.returncode not in (0,2) and 'no_weights' in r.stdout.replace('\n', '') and 'console.log' in r.stdout
    s = json.loads((tmp_path/'runs/small/status.json').read_text())
    assert s['state']=='failed' and 'no_weights' in s['cause'] and s['arms']['gs1_kernel']['state']=='queued'

MISTAKES = {'a loss misspelt in the second arm': (dict(loss='importance_samplin'), (), 'importance_samplin'), 'a model that is nowhere': (dict(base_model='no_such_model'), (), 'no_such_model'),
    'a GPU that is not here': ({}, ('--devices','0,99'), 'is not here'), 'no device': ({}, ('--devices','gpu'), "'gpu' is no device"), 'more items than there are': (dict(items=10**7), (), 'eval wants 10000000'),
    'nobody at the URL': ({}, ('--base-url','http://127.0.0.1:9'), 'start the endpoint'), 'no URL': ({}, ('--base-url','nonsense'), 'is no endpoint'), 'a file for a folder': ({}, ('--runs-dir','small.json'), 'small.json')}
@pytest.mark.parametrize('what', MISTAKES)
def test_a_mistake_is_said_before_anything_is_made(tmp_path, what):
    "One message, exit code 2, no folder, no traceback."
    changes,argv,word = MISTAKES[what]
    spec = small(tmp_path, **{k: v for k,v in changes.items() if k=='base_model'}); raw = json.loads(spec.read_text())
    if 'loss' in changes: raw['arms'][1]['loss']['name'] = changes['loss']
    if 'items' in changes: raw['eval']['n_examples'] = changes['items']
    spec.write_text(json.dumps(raw))
    r = rxnb('run', str(spec), *(argv if '--runs-dir' in argv else ('--runs-dir','runs',*argv)), cwd=tmp_path)
    assert r.returncode==2 and word in ' '.join(r.stdout.split()) and 'Traceback' not in r.stdout+r.stderr and not (tmp_path/'runs').exists(), r.stdout+r.stderr

def test_the_script_is_declared():
    "What pip makes `rxnb` of is there."
    ini = configparser.ConfigParser(delimiters=['=']); ini.read(root/'settings.ini')
    name,_,place = ini['DEFAULT']['console_scripts'].partition('=')
    module,function = place.split(':')
    assert name.strip()=='rxnb' and callable(getattr(importlib.import_module(module.strip()), function))
