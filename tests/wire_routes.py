"""Whatever of the SDK makes a request in training, sampling, saving, restoring and looking after what was saved: python wire_routes.py BASE_URL BASE_MODEL
Needs tinker, torch and numpy only, so that another environment can run it. Raises AssertionError where an answer is not what it should be."""
import json, os, pickle, sys, time, warnings
import httpx, numpy as np, tinker
from tinker import types
from wire_flow import ADAM, KEY, PROMPT, flow, now, params, text

os.environ['TINKER_TELEMETRY'] = '1'

def train(tc, n=1):
    for _ in range(n):
        tc.forward_backward([types.Datum(model_input=text(PROMPT[:-1]), loss_fn_inputs=dict(target_tokens=np.array(PROMPT[1:]), weights=np.ones(len(PROMPT)-1, np.float32)))], 'cross_entropy').result()
        tc.optim_step(ADAM).result()

def twice(logprobs): return 2*logprobs.sum(), {}

def checkpoints(sc, tc, rest, kept):
    "List, look at, lengthen, copy and delete checkpoints; runs and sessions."
    state,sampler,external = kept
    run = rest.get_training_run(tc.model_id).result()
    assert (run.training_run_id, run.lora_rank, run.last_checkpoint.tinker_path)==(tc.model_id, 4, state), run
    assert rest.get_training_run_by_tinker_path(sampler).result().training_run_id==tc.model_id
    assert rest.get_weights_info_by_tinker_path(state).result().lora_rank==4
    runs = rest.list_training_runs(limit=1).result(); assert runs.training_runs[0].training_run_id==tc.model_id and runs.cursor.total_count>=1
    assert {c.tinker_path for c in rest.list_checkpoints(tc.model_id).result().checkpoints}=={state, sampler, external}
    mine = rest.list_user_checkpoints(limit=2).result(); assert len(mine.checkpoints)==2 and mine.cursor.total_count>=3
    session = tc.model_id.split(':')[0]
    assert session in rest.list_sessions().result().sessions and rest.get_session(session).result().training_run_ids==[tc.model_id]
    rest.set_checkpoint_ttl_from_tinker_path(state, 7200).result()
    left = {c.tinker_path: c.expires_at for c in rest.list_checkpoints(tc.model_id).result().checkpoints}
    assert 7100<left[state].timestamp()-time.time()<=7200 and left[sampler] is None
    if hasattr(rest, 'copy_weights'):
        copy = rest.copy_weights(state, 'project', ttl_seconds=3600).result()
        assert copy!=state and rest.get_weights_info_by_tinker_path(copy).result().lora_rank==4
        again = now(sc.create_training_client_from_state(copy)); assert again.get_info().lora_rank==4
    urls = rest.get_external_weights_urls(external).result().urls
    assert set(urls)=={'adapter_config.json', 'adapter_model.safetensors'} and json.loads(httpx.get(urls['adapter_config.json'], trust_env=False).content)['r']==4
    rest.delete_checkpoint_from_tinker_path(external).result()
    assert external not in {c.tinker_path for c in rest.list_checkpoints(tc.model_id).result().checkpoints}

def main(base_url, base_model):
    flow(base_url, base_model)
    began = time.monotonic()
    sc = tinker.ServiceClient(base_url=base_url, api_key=KEY, user_metadata=dict(study='routes'))
    tc = now(sc.create_lora_training_client(base_model=base_model, rank=4, seed=0, user_metadata=dict(arm='one')))
    train(tc)
    if hasattr(sc, 'create_custom_loss'):
        handle = sc.create_custom_loss(twice, input_ranks=dict(logprobs=1)).result(); assert handle.loss_id
        tc.forward_backward_custom([types.Datum(model_input=text(PROMPT[:-1]), loss_fn_inputs=dict(target_tokens=np.array(PROMPT[1:])))], handle).result()
    kept = [f(name).result().path for f,name in ((tc.save_state, 's'), (tc.save_weights_for_sampler, 'v'), (tc.save_weights_external, 'x'))]
    sampler = now(sc.create_sampling_client(model_path=kept[1]))
    assert sampler.get_base_model()==base_model
    twin = pickle.loads(pickle.dumps(sampler))      # joins the sampling session
    assert [list(s.sample(text(PROMPT), 1, params(seed=1)).result().sequences[0].tokens) for s in (sampler, twin)].__len__()==2
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        rest = sc.create_rest_client(); sc.get_server_capabilities()
        tc.load_state_with_optimizer(kept[0]).result()
    assert rest.get_sampler(sampler._sampling_session_id).result().model_path==kept[1]
    slow = [sampler.sample(text(PROMPT), 16, params(200)) for _ in range(40)]   # more than one batch
    time.sleep(1.5)
    for f in slow[2:]: f.cancel()   # tells the server, where the SDK does
    for f in slow[:2]: f.result()
    checkpoints(sc, tc, rest, kept)
    while time.monotonic()-began<12: time.sleep(.2)  # a heartbeat comes every ten seconds
    closed = getattr(sc, 'close', None)
    if closed: now(closed('success'))
    print(json.dumps(dict(sdk=tinker.__version__)))

if __name__=='__main__': main(*sys.argv[1:])
