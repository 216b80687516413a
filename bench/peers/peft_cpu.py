"""PEFT LoRA steps on the CPU: peft_cpu.py MODEL THREADS BATCH SEQUENCE. Prints one JSON object.

The settings are those of bench/peers/cpu.ts: r = 16 on all linears, fp32, AdamW, clipping to 1, every token labelled.
"""
import json
import sys
import time

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

model_dir, threads, batch, sequence = sys.argv[1], *map(int, sys.argv[2:5])
torch.set_num_threads(threads)
model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
model.config.use_cache = False
lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
model = get_peft_model(model, lora).train()
trained = [p for p in model.parameters() if p.requires_grad]
optimizer = torch.optim.AdamW(trained, lr=1e-3)
ids = torch.randint(0, model.config.vocab_size, (batch, sequence))
seconds = []
for _ in range(12):
    start = time.perf_counter()
    model(input_ids=ids, labels=ids).loss.backward()
    torch.nn.utils.clip_grad_norm_(trained, 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    seconds.append(time.perf_counter() - start)
median = sorted(seconds[2:])[5]
print(json.dumps({"threads": threads, "stepMs": median * 1e3, "tokensPerSecond": batch * sequence / median}))
