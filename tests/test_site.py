"The site, a report and JupyterLab as a reader has them: in Chromium, and over Jupyter's own kernel API."
import json, os, re, shutil, subprocess, sys, time, urllib.request
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote
import pytest
from nbdev.config import get_config
from playwright.sync_api import sync_playwright
from rxnb.records import read_rows, write_json
from rxnb.report import report
from rxnb.spec import load_spec

cfg = get_config(path=Path(__file__).parent)
root,docs = cfg.config_path, cfg.config_path/'_docs'
PATIENCE_MS = 120_000   # of a machine that does other things beside
BROWSERS = ('chromium', 'chromium-browser', 'google-chrome', 'google-chrome-stable')

def newest(*folders): return max(p.stat().st_mtime for f in folders for p in (root/f).rglob('*') if p.is_file() and '__pycache__' not in p.parts)

@pytest.fixture(scope='session')
def site():
    "The built site; built now unless it is newer than all that it is made of."
    if not (docs/'index.html').exists() or (docs/'index.html').stat().st_mtime<newest('nbs','docs','rxnb'):
        subprocess.run([sys.executable, 'docs/rxnb_site.py'], cwd=root, check=True)
    return docs

@pytest.fixture(scope='session')
def browser():
    "A headless Chromium; there must be one, or what a reader sees is not tested."
    at = os.environ.get('RXNB_CHROMIUM') or next((b for n in BROWSERS if (b := shutil.which(n))), None)
    if not at: pytest.fail(f'no browser: install Debian\'s chromium (apt-get install chromium), or name one in $RXNB_CHROMIUM; looked for {", ".join(BROWSERS)}')
    with sync_playwright() as p:
        b = p.chromium.launch(executable_path=at, args=['--no-sandbox'], timeout=PATIENCE_MS)
        yield b
        b.close()

def patient(context):
    context.set_default_timeout(PATIENCE_MS); context.set_default_navigation_timeout(PATIENCE_MS)
    return context

@pytest.fixture
def page(browser):
    "A narrow window that remembers whatever goes wrong in it; a test ends only when nothing did."
    context = patient(browser.new_context(viewport=dict(width=400, height=900), color_scheme='light'))
    p,p_wrong = context.new_page(), []
    p.on('console', lambda m: p_wrong.append(f'console: {m.text}') if m.type=='error' else None)
    p.on('pageerror', lambda e: p_wrong.append(f'error: {e}'))
    p.on('dialog', lambda d: (p_wrong.append(f'dialog: {d.message}'), d.dismiss()))
    p.on('request', lambda r: None if r.url.startswith(('file:','data:')) else p_wrong.append(f'request: {r.url}'))
    yield p
    context.close()
    assert not p_wrong

SEEN = '''() => ({
    wide: [...document.querySelectorAll('article *, main *')].filter(e => { // sticks out of the window, and of no box that scrolls by itself
        if (e.getBoundingClientRect().right <= innerWidth+1 || e.closest('.toc-drawer')) return false;
        for (let b = e.parentElement; b && !/^(ARTICLE|MAIN|BODY)$/.test(b.tagName); b = b.parentElement) if (/auto|scroll/.test(getComputedStyle(b).overflowX) && b.getBoundingClientRect().right <= innerWidth+1) return false;
        return true;
    }).map(e => `${e.tagName}.${e.className.baseVal ?? e.className}`).slice(0, 5),
    page: document.documentElement.scrollWidth,
    levels: [...document.querySelectorAll('h1,h2,h3,h4,h5,h6')].filter(h => h.offsetParent && !h.closest('.cell_output')).map(h => +h.tagName[1]),
    images: [...document.querySelectorAll('img')].filter(i => !(i.alt && i.naturalWidth > 50)).map(i => [i.src.slice(-40), i.alt, i.naturalWidth]),
    figures: document.querySelectorAll('.cell_output img').length})'''

def skips(levels): return [(a,b) for a,b in zip([0, *levels], levels) if b>a+1]

# The site

def test_every_page(site, page):
    "Loads without an error and without a request; fits into 400 px; headings in order; figures have a size and words."
    figures,wrong = 0,{}
    for f in sorted(site.glob('*.html')):
        page.goto(f.as_uri())
        seen = page.evaluate(SEEN)
        figures += seen['figures']
        problems = dict(wide=seen['wide'] or seen['page']>400, skipped=skips(seen['levels']), images=seen['images'])
        if any(problems.values()): wrong[f.name] = {k: v for k,v in problems.items() if v}
    assert not wrong
    assert figures>=10

def test_search_works_from_files(site, page):
    page.goto(f'{(site/"search.html").as_uri()}?q=tailrl')
    page.wait_for_selector('#search-results li')
    found = page.locator('#search-results li a').all_text_contents()
    assert any('TailRL under lag' in t for t in found)

def test_site_goes_dark(site, page):
    page.goto((site/'index.html').as_uri())
    background = lambda: page.evaluate('getComputedStyle(document.body).backgroundColor')
    light = background()
    for _ in range(3):
        page.locator('.theme-toggle:visible').first.click()
        if background()!=light: break
    assert sum(map(int, re.findall(r'\d+', background())[:3]))<150

class Page(HTMLParser):
    "Links and ids of a page."
    def __init__(self, text): super().__init__(); self.links,self.ids,self.loads = [],set(),[]; self.feed(text)
    def handle_starttag(self, tag, attrs):
        a = dict(attrs)
        self.ids |= {a[k] for k in ('id','name') if a.get(k)}
        if tag=='a' and a.get('href'): self.links.append(a['href'])
        if tag in ('script','img','iframe') and a.get('src'): self.loads.append(a['src'])
        if tag=='link' and a.get('rel') in ('stylesheet','icon','preload') and a.get('href'): self.loads.append(a['href'])

def test_links_lead_somewhere(site):
    "Every link between pages has its page and its place there, and nothing is loaded from elsewhere."
    pages = {f: Page(f.read_text(encoding='utf-8')) for f in site.rglob('*.html')}
    dead,outside = [],[]
    for f,p in pages.items():
        outside += [(f.name,x) for x in p.loads if x.startswith(('http:','https:','//'))]
        for href in p.links:
            if re.match(r'[a-z]+:', href): continue
            path,_,at = unquote(href).partition('#')
            to = (f.parent/path.split('?')[0]).resolve() if path else f.resolve()
            known = pages.get(to)
            if not to.exists() or (at and known and to.suffix=='.html' and at not in known.ids): dead.append((f.name, href))
    assert not dead and not outside

def test_guides_stand_in_the_sidebar(site):
    text = (site/'index.html').read_text(encoding='utf-8')
    for name in ('quickstart','own_study','own_method','read_a_decision','papers','glossary','gs1_tiny','tailrl_tiny','centering_tiny','report'): assert f'href="{name}.html"' in text, name

# A report

EVIL = '</script><script>document.title="owned"</script><img src=x onerror="alert(1)">'

@pytest.fixture(scope='session')
def big(tmp_path_factory):
    "Four arms with 200 steps and 1,319 items each, every answer about a thousand characters, some of them hostile."
    import numpy as np
    runs,rng = tmp_path_factory.mktemp('runs'),np.random.default_rng(0)
    raw = json.loads(json.dumps(load_spec('tailrl_tiny').raw))
    raw.update(name='big', activation_gate=None, restoration_preflight=None)
    raw['task'] = dict(name='gsm8k', train_split='train', eval_split='test', reward='correct') # it has as many items
    raw['eval']['n_examples'] = 1319
    study = load_spec(raw)
    words = [''.join(rng.choice(list('abcdefghijklmnop'), rng.integers(2, 9))) for _ in range(3000)]
    text = lambda: ' '.join(rng.choice(words, 180))
    question = [text()[:230] for _ in range(1319)]
    for a in study.arms:
        folder = shutil.copytree(root/'nbs/results/tailrl_tiny'/a.name/'attempt_1', runs/'big'/a.name/'attempt_1')
        for name in ('manifest','result'): write_json(folder/f'{name}.json', dict(json.loads((folder/f'{name}.json').read_text()), spec_sha256=study.sha256, **(dict(spec=raw) if name=='manifest' else {})))
        steps = read_rows(folder/'steps.jsonl')
        (folder/'steps.jsonl').write_text(''.join(json.dumps(dict(steps[i%len(steps)], step=i))+'\n' for i in range(200)))
        rows = [dict(item_id=f'gsm8k/test/{i}', correct=int(rng.random()<.5), extracted='1', gold='1', reason='correct', stop_reason='stop', completion_tokens=200, text=EVIL if i==3 else text(), question=EVIL if i==3 else question[i], grader='marker-1') for i in range(1319)]
        (folder/'eval.jsonl').write_text(''.join(json.dumps(r)+'\n' for r in rows))
    return report(study, runs)

def opened(page, path):
    "Open a report and wait for its items; seconds that took."
    page.goto(path.as_uri())
    page.wait_for_function('document.documentElement.dataset.ready === "yes"')
    return page.evaluate('performance.now()')/1000

def test_a_large_report_is_small(page, big):
    took = opened(page, big)
    print(f'{big.stat().st_size/1e6:.2f} MB, {took:.2f} s to its items')
    assert big.stat().st_size<=5e6
    seen = page.evaluate(SEEN)
    assert not seen['wide'] and seen['page']<=400 and not skips(seen['levels'])
    assert page.locator('figure svg').first.bounding_box()['width']>200

def test_items_filter(page, big):
    opened(page, big)
    number = lambda i: int(page.locator(f'#n-{i}').inner_text())
    count = lambda: int(page.locator('#count').inner_text().split()[0])
    a,b = page.locator('#arm-a').input_value(), page.locator('#arm-b').input_value()
    right = {arm: {r['item_id']: r['correct'] for r in read_rows(big.parent/arm/'attempt_1/eval.jsonl')} for arm in (a,b)}
    want = lambda f: sum(f(right[a][i], right[b][i]) for i in right[a])
    assert number('only_a')==want(lambda x, y: x>y) and number('neither')==want(lambda x, y: not x and not y)
    assert count()==want(lambda x, y: x!=y)
    assert page.locator('.item').count()==25
    page.locator('#more').click()
    assert page.locator('.item').count()==50
    page.locator('#kind').select_option('only_b')
    assert count()==number('only_b')==want(lambda x, y: x<y)
    assert page.locator('.answers .right').count()==page.locator('.answers .wrong').count()==25
    page.locator('#kind').select_option('all')
    page.locator('#words').fill(right and json.loads((big.parent/a/'attempt_1/eval.jsonl').read_text().splitlines()[7])['text'][:60])
    assert count()==1 and page.locator('.item h3').inner_text()=='gsm8k/test/7'

def test_what_a_model_wrote_stays_text(page, big):
    opened(page, big)
    page.locator('#kind').select_option('all')
    page.locator('#words').fill('onerror')
    assert page.locator('.item pre').first.inner_text()==EVIL
    assert page.title()!='owned' and page.locator('.item img').count()==0

def test_report_by_keyboard_and_in_the_dark(page, big):
    opened(page, big)
    reached = []
    for _ in range(60):
        page.keyboard.press('Tab')
        reached.append(page.evaluate('document.activeElement.id'))
    assert {'theme','arm-a','arm-b','kind','words'} <= set(reached)
    background = lambda: page.evaluate('getComputedStyle(document.body).backgroundColor')
    light = background()
    page.locator('#theme').focus()
    page.keyboard.press('Enter')
    assert background()!=light and page.evaluate('getComputedStyle(document.querySelector("svg text")).fill')==page.evaluate('getComputedStyle(document.body).color')

# JupyterLab

@pytest.fixture
def lab(tmp_path):
    "A JupyterLab of its own, with nothing of the user's."
    env = dict(os.environ, JUPYTER_CONFIG_DIR=str(tmp_path/'config'), JUPYTER_DATA_DIR=str(tmp_path/'data'), JUPYTER_RUNTIME_DIR=str(tmp_path/'runtime'), IPYTHONDIR=str(tmp_path/'ipython'))
    log = (tmp_path/'lab.log').open('w')
    at = [sys.executable, '-m', 'jupyterlab', '--no-browser', '--allow-root', '--port=0', '--port-retries=0', '--IdentityProvider.token=t', f'--ServerApp.root_dir={root}', '--LabApp.news_url=None', '--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate']
    server = subprocess.Popen(at, env=env, stdout=log, stderr=subprocess.STDOUT)
    try:
        for _ in range(240):
            info = [p for p in (tmp_path/'runtime').glob('jpserver-*.json') if p.read_text().endswith('}')] # written whole
            if info or server.poll() is not None: break
            time.sleep(.5)
        assert info, (tmp_path/'lab.log').read_text()[-2000:]
        yield json.loads(info[0].read_text())['url']
    finally:
        server.terminate()
        try: server.wait(30)
        except subprocess.TimeoutExpired: server.kill(); server.wait() # asked to end while a kernel starts, it may never do so
        log.close()

def asked(url, at, **body):
    "An answer of the server's API."
    data = json.dumps(body).encode() if body else None
    with urllib.request.urlopen(urllib.request.Request(f'{url}api/{at}', data, {'Authorization':'token t','Content-Type':'application/json'}, method='POST' if body else 'GET')) as r: return json.load(r)

def executed(socket, code):
    "Run a cell over the kernel's channels; what it displayed. An error of the cell fails the test."
    import uuid
    msg = uuid.uuid4().hex
    socket.send(json.dumps(dict(channel='shell', header=dict(msg_id=msg, msg_type='execute_request', username='', session=msg, version='5.3', date=''), parent_header={}, metadata={},
        content=dict(code=code, silent=False, store_history=True, user_expressions={}, allow_stdin=False, stop_on_error=True))))
    shown = []
    while True:
        m = json.loads(socket.recv())
        if m['parent_header'].get('msg_id')!=msg: continue
        assert m['msg_type']!='error', '\n'.join(m['content']['traceback'])
        if m['msg_type'] in ('execute_result','display_data'): shown.append(m['content']['data'])
        if m['msg_type']=='status' and m['content']['execution_state']=='idle': return shown

def test_jupyterlab_runs_an_arm(lab, browser, tmp_path):
    "The notebook is there in the browser, and its cells run one after the other in a kernel of the server."
    import websocket
    cells = [c for c in asked(lab, 'contents/nbs/run_arm.ipynb')['content']['cells'] if c['cell_type']=='code' and c['source'].strip()]
    kernel = asked(lab, 'kernels', name='python3', path='nbs')
    socket = websocket.create_connection(f'{lab.replace("http","ws",1)}api/kernels/{kernel["id"]}/channels?token=t', timeout=300)
    shown = []
    for n,c in enumerate(cells):
        shown += executed(socket, c['source'])
        if n==0: executed(socket, f"arm, stage, runs_dir = 'grpo_gs8', 'pilot', {str(tmp_path/'runs')!r}")
    socket.close()
    result = json.loads(next((tmp_path/'runs').glob('gs1_tiny/grpo_gs8/pilot_1/result.json')).read_text())
    assert (result['status'], result['steps'])==('pilot', 2)
    assert any('image/png' in d for d in shown) and any('text/markdown' in d for d in shown)
    context = patient(browser.new_context(viewport=dict(width=1200, height=900)))
    p = context.new_page()
    p.goto(f'{lab}lab/tree/nbs/run_arm.ipynb?token=t')
    p.wait_for_selector('.jp-Notebook .jp-RenderedMarkdown h1', timeout=120_000)
    assert 'Run one arm' in p.locator('.jp-Notebook').inner_text()
    context.close()
