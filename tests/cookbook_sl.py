"""The supervised loop of the unmodified tinker-cookbook: python cookbook_sl.py BASE_URL MODEL_FOLDER LOG_FOLDER
Runs in the cookbook's own environment; its recipe `sl_basic` with a file of conversations in place of a data set from the hub."""
import asyncio, json, sys
from pathlib import Path
from tinker_cookbook.supervised import train
from tinker_cookbook.supervised.data import FromConversationFileBuilder
from tinker_cookbook.supervised.types import ChatDatasetBuilderCommonConfig

def main(base_url, model, log_path):
    file = Path(log_path).with_suffix('.jsonl')
    talk = lambda a, b: dict(messages=[dict(role='user', content=f'What is {a} + {b}?'), dict(role='assistant', content=str(a+b))])
    file.write_text('\n'.join(json.dumps(talk(i%7, i%5)) for i in range(64)))
    common = ChatDatasetBuilderCommonConfig(model_name_for_tokenizer=model, renderer_name='qwen3_instruct', max_length=128, batch_size=16)
    asyncio.run(train.main(train.Config(log_path=log_path, model_name=model, recipe_name='recipe_sl_basic', renderer_name='qwen3_instruct', base_url=base_url, learning_rate=1e-3,
        dataset_builder=FromConversationFileBuilder(common_config=common, file_path=str(file)), lora_rank=8, num_epochs=2, eval_every=0, save_every=4)))

if __name__=='__main__': main(*sys.argv[1:])
