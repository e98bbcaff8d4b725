"A planted key is looked for wherever a run writes; what a client names never leaves the checkpoint folder."
import json, logging, os
os.environ['OMP_NUM_THREADS'] = '1'; os.environ['TINKER_TELEMETRY'] = '0'
import numpy as np, papermill as pm, pytest, tinker, torch
from pathlib import Path
from rxnb.connect import check_endpoint
from rxnb.engine import random_model
from rxnb.serve import packaged_models, serve
from test_faults import small

SECRET = 'tml-plantedsecret0123456789'
root = Path(__file__).parents[1]
torch.set_num_threads(1)

def everywhere(folder): return [(p, p.read_bytes()) for p in folder.rglob('*') if p.is_file()]

def test_the_key_is_nowhere(tmp_path, monkeypatch, caplog, capfd):
    "An arm through its notebook against a server that wants the key, a report, an error: no file and no line holds it."
    (runs := tmp_path/'runs').mkdir(); caplog.set_level(logging.INFO)
    monkeypatch.setenv('TINKER_API_KEY', SECRET); monkeypatch.setenv('PYTHONPATH', str(root))
    with serve('tiny_arith', device='cpu', token=SECRET, checkpoint_dir=tmp_path/'checkpoints') as s:
        with pytest.raises(tinker.AuthenticationError):
            tinker.ServiceClient(base_url=s.base_url, api_key='tml-wrong').create_lora_training_client(base_model='tiny_arith', rank=2).result()
        where = f'http://someone:{SECRET}@{s.host}:{s.port}?key={SECRET}'
        pm.execute_notebook(str(root/'nbs/run_arm.ipynb'), str(runs/'arm.ipynb'), dict(spec=str(small(tmp_path)), arm='grpo_gs8', runs_dir=str(runs), base_url=s.base_url), progress_bar=False, cwd=str(root/'nbs'))
        report = check_endpoint(where, 'tiny_arith', use=False)._repr_markdown_()+check_endpoint(s.base_url, 'tiny_arith', use=False)._repr_markdown_()
    files = everywhere(tmp_path); assert any(p.name=='manifest.json' for p,_ in files) and any(p.name=='arm.ipynb' for p,_ in files) and any(p.suffix=='.safetensors' for p,_ in files)
    assert [p for p,b in files if SECRET.encode() in b]==[]
    out,err = capfd.readouterr(); assert SECRET not in out+err+caplog.text+report

def test_weights_are_read_as_safetensors_only(tmp_path):
    "A pickle in a model folder or in the checkpoint folder is not opened."
    model = random_model('llama', tmp_path/'model'); torch.save({'x': torch.ones(1)}, tmp_path/'pytorch_model.bin')
    (model/'model.safetensors').unlink(); (tmp_path/'pytorch_model.bin').rename(model/'pytorch_model.bin')
    with pytest.raises(FileNotFoundError, match='safetensors'): serve(model, device='cpu')
    ck = tmp_path/'ck'/'a_train_0'/'weights'; ck.mkdir(parents=True); torch.save({'x': torch.ones(1)}, ck/'evil.safetensors')
    with pytest.raises(ValueError, match='no safetensors file'): serve(random_model('llama', tmp_path/'other'), device='cpu', checkpoint_dir=tmp_path/'ck')

def test_code_that_comes_with_a_model_does_not_run(tmp_path):
    model = random_model('llama', tmp_path/'model'); c = json.loads((model/'config.json').read_text()); ran = tmp_path/'ran'
    (model/'config.json').write_text(json.dumps(dict(c, auto_map={'AutoConfig': 'evil.C', 'AutoModelForCausalLM': 'evil.M'}))); (model/'evil.py').write_text(f'open({str(ran)!r}, "w").write("x")')
    with serve(model, device='cpu') as s: pass
    assert not ran.exists()
