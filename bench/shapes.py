"Models of random weights that both sides build alike, and the fixed work of a step."
import argparse, os, platform, sys

SHAPES = {
    '2m':   dict(vocab_size=64, hidden_size=192, intermediate_size=512, num_hidden_layers=4, num_attention_heads=6, num_key_value_heads=6),
    '135m': dict(vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3, tie_word_embeddings=True),
    '600m': dict(vocab_size=151936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16, num_key_value_heads=8, head_dim=128, tie_word_embeddings=True)}
LETTERS = '0123456789+-=?# \n.abcdefghijklmnopqrstuvwxyz'

def arguments(about):
    p = argparse.ArgumentParser(description=about)
    p.add_argument('--size', choices=list(SHAPES), default='2m')
    for name,n in dict(steps=10, warmup=2, prompts=8, group=8, tokens=64, prompt_tokens=48, lora=32, threads=2).items(): p.add_argument('--'+name.replace('_', '-'), type=int, default=n)
    p.add_argument('--device', default='cpu')
    return p

def quiet(threads):
    "Before torch is imported."
    os.environ.update(OMP_NUM_THREADS=str(threads), HF_HUB_OFFLINE='1', TRANSFORMERS_OFFLINE='1', TOKENIZERS_PARALLELISM='false', TINKER_TELEMETRY='0')

def tokenizer():
    "A letter a token."
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    t = Tokenizer(models.WordLevel({c:i for i,c in enumerate(['<pad>', '<eos>', '<unk>', *LETTERS])}, unk_token='<unk>'))
    t.pre_tokenizer, t.decoder = pre_tokenizers.Split('', 'isolated'), decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=t, pad_token='<pad>', eos_token='<eos>', unk_token='<unk>', padding_side='left')

def model(size, device, eos):
    "The random model, in float32 on a CPU and in bfloat16 elsewhere."
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    torch.manual_seed(0)
    m = LlamaForCausalLM(LlamaConfig(max_position_embeddings=4096, pad_token_id=0, eos_token_id=eos, bos_token_id=1, **SHAPES[size]))
    return m.float() if device=='cpu' else m.to(device, torch.bfloat16)

def machine(gpu=True):
    "What a time was measured on: the GPU where there is one, or the processor."
    try: import torch; name = torch.cuda.get_device_name() if gpu and torch.cuda.is_available() else None
    except ImportError: name = None
    return name or f'{platform.machine()}, {os.cpu_count()} cores shared with others'

def prompts(n, tokens): return [(f'{10+i//16%64}+{10+i%16}=?'+' '*tokens)[:tokens] for i in range(n)]

def turn():
    "Wait until the other side has done its step, if there is another side."
    if os.environ.get('BENCH_TURNS'): print('ready', flush=True); sys.stdin.readline()
