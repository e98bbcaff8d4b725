"""An exported adapter in the hands of PEFT: python peft_reads.py MODEL_FOLDER ADAPTER_FOLDER TOKENS
Runs where peft is installed; prints the log-probabilities of the tokens after the first, without and with the adapter."""
import json, sys
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

def logps(model, ids):
    with torch.no_grad(): out = model(ids[None]).logits[0,:-1].double().log_softmax(-1)
    return out.gather(1, ids[1:,None])[:,0].tolist()

base,adapter,ids = sys.argv[1],sys.argv[2],torch.tensor(json.loads(sys.argv[3]))
model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
before = logps(model, ids)
print(json.dumps([before, logps(PeftModel.from_pretrained(model, adapter).eval(), ids)]))
