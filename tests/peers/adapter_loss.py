"""Evaluation loss of a LoRA adapter by transformers + PEFT, in fp32 on the CPU: adapter_loss.py MODEL ADAPTER DATA.

Prints one JSON object. Labels are everything after the generation prompt, as in loramem.
"""
import json
import sys

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

model_dir, adapter_dir, data = sys.argv[1:4]
tokenizer = AutoTokenizer.from_pretrained(model_dir)
model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
model = PeftModel.from_pretrained(model, adapter_dir).eval()


def encode(messages):
    full = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True)["input_ids"]
    prompt = tokenizer.apply_chat_template(
        messages[:-1], tokenize=True, add_generation_prompt=True, return_dict=True
    )["input_ids"]
    return full, [-100] * len(prompt) + full[len(prompt):]


total, count = 0.0, 0
with torch.no_grad(), open(data, encoding="utf-8") as lines:
    for line in lines:
        ids, labels = encode(json.loads(line)["messages"])
        ids, labels = torch.tensor([ids]), torch.tensor([labels])
        labelled = int((labels[:, 1:] != -100).sum())
        total += float(model(input_ids=ids, labels=labels).loss) * labelled
        count += labelled
print(json.dumps({"loss": total / count, "labelledTokens": count}))
