"""Run notebooks so that coverage can see it: an exported cell is run as the lines of its module that were made of it.

A notebook runs its own cells and not the module that is exported from them, so a plain run would count nothing. `test_notebooks.py` takes this way under
`make coverage`; one alone: coverage run tests/cover_notebooks.py 06_lag
"""
import os, re, sys
from pathlib import Path
from execnb.shell import CaptureShell
from fastcore.utils import working_directory
from nbdev.config import get_config
from nbdev.process import NBProcessor

cfg = get_config(path=Path(__file__).parent)

def blocks(module):
    "Cell id -> (first line, text) of each exported cell of a module."
    text = module.read_text(encoding='utf-8')
    marks = list(re.finditer(r'^# %% \.\./nbs/\S+ #(\w+)\n', text, re.M))
    return {m[1]: (text[:m.end()].count('\n'), text[m.end():n.start() if n else len(text)]) for m,n in zip(marks, [*marks[1:], None])}

def run(path):
    "Run a notebook with its exported cells taken from the module; raises what a cell raises."
    nb = NBProcessor(path, rm_directives=False, process=True).nb
    sources = [c.source for c in nb.cells]
    name = next((m[1] for s in sources if (m := re.match(r'#\| default_exp (\w+)', s))), None)
    module = cfg.lib_path/f'{name}.py'
    made = blocks(module) if name else {}
    for c in nb.cells:
        if c.cell_type!='code' or c.id not in made: continue
        before,text = made[c.id]
        text = re.sub(r"\nif __name__=='__main__'.*", '\n', text) # of the module alone
        c.set_source(f"__package__ = '{cfg.lib_name}'\nexec(compile({chr(10)*before+text!r}, {str(module)!r}, 'exec', dont_inherit=True), globals())")
    skip = lambda c: c.cell_type!='code' or c.directives_.get('eval:')==['false'] or bool(set(cfg.tst_flags.split()) & c.directives_.keys()) or 'nbdev_export' in c.source
    os.environ['IN_TEST'] = '1'
    with working_directory(path.parent):
        if str(cfg.config_path) not in sys.path: sys.path.insert(0, str(cfg.config_path))
        CaptureShell(path).run_all(nb, exc_stop=True, preproc=skip)

if __name__=='__main__':
    for name in sys.argv[1:]: run(cfg.nbs_path/f'{name}.ipynb')
