"A study as its users run it: papermill at a shell, from the root and from nbs/, and from a wheel without the repository."
import copy, json, os, subprocess, sys
from pathlib import Path
import nbformat, pandas as pd, pytest
from rxnb.records import attempts, completed, read_rows
from rxnb.spec import load_spec
from rxnb.study import decide, run_arm

root = Path(__file__).parents[1]
bin = Path(sys.executable).parent

def small_spec(folder, **changes):
    "gs1_tiny cut to 4 steps of 8 rollouts and 32 items, in a file."
    raw = copy.deepcopy(load_spec('gs1_tiny').raw)
    raw.update(name='gs1_small', steps=4, batch_size=8, curve=dict(split='validation', n_examples=16, every=2), eval=dict(n_examples=32, max_tokens=32, metric='accuracy'), **changes)
    for a in raw['arms']: a['groups_per_batch'] = 8//a['group_size']
    path = folder/'gs1_small.json'
    path.write_text(json.dumps(raw))
    return path

def papermill(*args, cwd=root):
    return subprocess.run([bin/'papermill', *map(str, args)], cwd=cwd, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=600)

@pytest.fixture(scope='module')
def study_run(tmp_path_factory):
    "Two arms at a shell, one from each folder, then the whole study through its notebook."
    tmp = tmp_path_factory.mktemp('study')
    spec,runs = small_spec(tmp), tmp/'runs'
    runs.mkdir()
    common = ('-p','spec',spec,'-p','runs_dir',runs)
    calls = [papermill('nbs/run_arm.ipynb', runs/'one.ipynb', '-p','arm','gs1_kernel', *common),
             papermill('run_arm.ipynb', runs/'two.ipynb', '-p','arm','grpo_gs8', *common, cwd=root/'nbs'),
             papermill('nbs/run_study.ipynb', runs/'study.ipynb', *common)]
    return spec,runs,calls

def shown(notebook):
    "All text that a notebook's outputs show."
    parts = [o.get('text') or ''.join(o.get('data',{}).get(k,'') for k in ('text/markdown','text/plain')) for c in nbformat.read(notebook, 4).cells for o in c.get('outputs',[])]
    return '\n'.join(parts)

def test_both_folders_work(study_run):
    for call in study_run[2]: assert call.returncode==0, call.stderr[-2000:]

def test_decision_cell_waits_then_decides(study_run):
    spec,runs,_ = study_run
    assert '`grpo_gs8`, `gs1_batchmean` not complete' in shown(runs/'one.ipynb')
    assert '`gs1_batchmean` not complete' in shown(runs/'two.ipynb')
    text = shown(runs/'study.ipynb')
    assert 'inconclusive' in text and 'discordant pairs of 32' in text

def test_progress_and_plots_are_shown(study_run):
    _,runs,_ = study_run
    assert 'step   4/4  reward' in shown(runs/'one.ipynb')
    images = [o for c in nbformat.read(runs/'one.ipynb', 4).cells for o in c.get('outputs',[]) if 'image/png' in o.get('data',{})]
    assert images

def test_rows_are_the_truth(study_run):
    spec,runs,_ = study_run
    study = load_spec(spec)
    for arm in study.arms:
        folder,result = completed(study, arm.name, runs)
        rows = read_rows(folder/'steps.jsonl')
        assert [r['step'] for r in rows]==[0,1,2,3] and [r['lag'] for r in rows]==[0]*4
        assert all(r['rollouts']==8 and r['prompts']==arm.groups_per_batch and r['spec_sha256']==study.sha256 for r in rows)
        assert len(pd.read_parquet(folder/'rollouts.parquet'))==32
        assert len({r['item_id'] for r in read_rows(folder/'eval.jsonl')})==32==result['eval']['n']
    stored = json.loads((runs/study.name/'decision.json').read_text())
    assert stored['mean']==decide(study, runs).mean==stored['accuracy']['gs1_kernel']-stored['accuracy']['grpo_gs8']

def test_arms_of_a_study_differ_only_where_they_should(study_run):
    spec,runs,_ = study_run
    study = load_spec(spec)
    m = {a.name: json.loads((completed(study, a.name, runs)[0]/'manifest.json').read_text()) for a in study.arms}
    for key in ('optimizer','lora','prompt','sampling','grader','loss','lag','steps'): assert m['grpo_gs8'][key]==m['gs1_kernel'][key]==m['gs1_batchmean'][key]
    assert m['gs1_kernel']['advantage']['name']=='kernel' and m['grpo_gs8']['group_size']==8

def test_same_prompts_for_arms_of_one_group_size(study_run):
    spec,runs,_ = study_run
    ids = lambda arm: pd.read_parquet(completed(load_spec(spec), arm, runs)[0]/'rollouts.parquet').prompt_id.tolist()
    assert ids('gs1_kernel')==ids('gs1_batchmean')
    assert list(dict.fromkeys(ids('grpo_gs8')))==ids('gs1_kernel')[:4]

def test_running_again_changes_nothing(study_run):
    spec,runs,_ = study_run
    before = {p: p.stat().st_mtime_ns for p in runs.rglob('*.jsonl')}
    run_arm(spec, 'gs1_kernel', runs)
    assert before=={p: p.stat().st_mtime_ns for p in runs.rglob('*.jsonl')}

@pytest.mark.parametrize('args,said', [
    (['-p','armm','gs1_kernel'], 'armm'), (['-p','arm','kernel'], 'gs1_batchmean'), (['-p','spec','gs1_tinny'], 'gs1_tiny'), (['-p','stage','half'], 'pilot'),
    (['-p','base_url','http://127.0.0.1:9'], 'http://127.0.0.1:9')])
def test_a_mistake_is_one_clear_error_and_writes_nothing(tmp_path, args, said):
    (runs := tmp_path/'runs').mkdir()
    r = papermill('nbs/run_arm.ipynb', tmp_path/'out.ipynb', '-p','runs_dir',runs, *args)
    assert r.returncode!=0 and said in r.stderr
    assert list(runs.iterdir())==[]

def test_missing_data_and_model_name_what_was_looked_for(tmp_path, monkeypatch):
    (data := tmp_path/'data').mkdir(); (runs := tmp_path/'runs').mkdir()
    monkeypatch.setenv('RXNB_DATA_DIR', str(data))
    with pytest.raises(FileNotFoundError, match='gsm8k/train'): run_arm('gsm8k_smoke', 'grpo', runs)
    monkeypatch.delenv('RXNB_DATA_DIR')
    with pytest.raises(Exception, match='no/such/folder/here'): run_arm(small_spec(tmp_path, base_model='no/such/folder/here'), 'grpo_gs8', runs)
    with pytest.raises(ValueError, match='unknown parameter'): run_arm('gs1_tiny', 'grpo_gs8', runs, learning_rate=1e-4)
    assert list(runs.iterdir())==[]

def test_gsm8k_on_a_real_tokenizer_and_a_random_model(tmp_path):
    "GSM8K rows through the whole loop; the model is random, so only the path is tested."
    data = Path(os.environ.get('RXNB_DATA_DIR') or root.parent/'shared'/'data')
    if not (data/'gsm8k'/'train.jsonl').exists(): pytest.skip(f'no gsm8k/train.jsonl in {data}: set RXNB_DATA_DIR')
    from rxnb.engine import random_model
    from rxnb.study import execute
    config = random_model('llama', tmp_path/'random')/'config.json' # its tokens are bytes, so GSM8K prompts are long
    config.write_text(json.dumps(dict(json.loads(config.read_text()), max_position_embeddings=4096)))
    raw = dict(load_spec('gsm8k_smoke').raw, base_model=str(tmp_path/'random'), max_seq_len=4096)
    with pytest.raises(RuntimeError, match='never stepped'): execute(load_spec(raw), 'grpo', runs_dir=tmp_path/'runs', data_dir=data) # no answer is right, so nothing is learned
    result = attempts(load_spec(raw), 'grpo', tmp_path/'runs')[0][2]
    assert (result['status'], result['eval']['n'], result['steps'])==('failed', 8, 2)

def test_wheel_runs_without_the_repository(tmp_path):
    "Built, unpacked elsewhere, and run there: it finds its specs, its model and its notebooks."
    subprocess.run([sys.executable,'-m','pip','wheel','-q','--no-deps','--no-build-isolation','-w',tmp_path,root], check=True)
    wheel, = tmp_path.glob('rxnb-*.whl')
    subprocess.run([sys.executable,'-m','pip','install','-q','--no-deps','--target',tmp_path/'site',wheel], check=True)
    spec = small_spec(tmp_path)
    code = f'''
import rxnb; assert rxnb.__file__.startswith({str(tmp_path)!r}), rxnb.__file__
from rxnb.spec import spec_names; assert "gs1_tiny" in spec_names()
from rxnb.study import run_arm, notebook; assert str(notebook("run_arm.ipynb")).startswith({str(tmp_path)!r})
print(run_arm({str(spec)!r}, "gs1_kernel", {str(tmp_path/"runs")!r}, stage="pilot")["status"])
'''
    r = subprocess.run([sys.executable,'-c',code], cwd=tmp_path, env=dict(os.environ, PYTHONPATH=str(tmp_path/'site')), capture_output=True, text=True)
    assert r.returncode==0 and r.stdout.strip().endswith('pilot'), r.stderr[-2000:]
