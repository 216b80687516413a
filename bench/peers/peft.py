"""LoRA by transformers + PEFT on a case of run.ts, one setting after another; prints one JSON object for each.

    python3 bench/peers/peft.py CASE --device cuda --settings default,bf16a+compile --warm 4 --steps 12

A setting is "default" (bf16 base, fp32 adapters, SDPA, fused AdamW) or words joined by "+": bf16a (adapters in bf16 too),
compile (torch.compile), liger (Liger's kernels), checkpoint (gradient checkpointing), fp32 (base in fp32, no TF32: the
reference for distances). Each setting has a process of its own, forked after the imports, so that it finds a fresh device
and costs no second import.
"""
import argparse
import json
import os
import signal
import sys
import time

# Asking whether there is a device must not initialize the driver: a forked process could not use it then.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# This file has the name of a package that it imports.
sys.path[:] = [folder for folder in sys.path if os.path.realpath(folder) != os.path.dirname(os.path.realpath(__file__))]

import peft  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402

STRETCHES = 3
GIB = 2**30
WORDS = {"default", "bf16a", "compile", "liger", "checkpoint", "fp32"}


def apply_liger(family):
    from liger_kernel import transformers as liger

    options = dict(rope=True, rms_norm=True, swiglu=True, cross_entropy=False, fused_linear_cross_entropy=True)
    getattr(liger, f"apply_liger_kernel_to_{family}")(**options)


def load(case, words, device):
    config = transformers.AutoConfig.from_pretrained(f"{case}/model")
    if "liger" in words:
        apply_liger(config.model_type)
    dtype = torch.float32 if "fp32" in words else torch.bfloat16
    options = dict(dtype=dtype, attn_implementation="sdpa", device_map=device)
    model = transformers.AutoModelForCausalLM.from_pretrained(f"{case}/model", **options)
    model.config.use_cache = False
    options = dict(is_trainable=True, autocast_adapter_dtype="bf16a" not in words)
    model = peft.PeftModel.from_pretrained(model, f"{case}/adapter", **options)
    if "checkpoint" in words:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.enable_input_require_grads()
    return model.train()


def status_bytes(field):
    with open("/proc/self/status", encoding="utf-8") as lines:
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith(field + ":"))


def save_gradients(model, path):
    from safetensors.torch import save_file

    named = ((name, p.grad) for name, p in model.named_parameters() if p.requires_grad)
    short = {
        name.removeprefix("base_model.model.").replace(".default.weight", ""): grad.float().cpu().contiguous()
        for name, grad in named
    }
    save_file(short, path)


def run(args, setting):
    words = set(setting.split("+"))
    if words - WORDS:
        raise ValueError(f"unknown setting {setting}: join words of {sorted(WORDS)} by +")
    gpu = args.device == "cuda"
    if gpu:
        torch.cuda.init()
        torch.zeros(1, device="cuda")
        free_before = torch.cuda.mem_get_info()[0]
    with open(f"{args.case}/case.json", encoding="utf-8") as file:
        about = json.load(file)
    started = time.perf_counter()
    model = load(args.case, words, args.device)
    load_seconds = time.perf_counter() - started
    trained = [p for p in model.parameters() if p.requires_grad]
    s = about["settings"]
    optimizer = torch.optim.AdamW(
        trained,
        lr=s["learningRate"],
        betas=(s["beta1"], s["beta2"]),
        eps=s["adamEps"],
        weight_decay=s["weightDecay"],
        fused=True,
    )
    tokens = torch.from_file(f"{args.case}/tokens.i32", size=about["steps"] * about["documents"] * about["tokens"], dtype=torch.int32)
    batches = tokens.view(about["steps"], about["documents"], about["tokens"]).to(args.device, torch.int64)
    forward = torch.compile(model) if "compile" in words else model
    losses = []

    def step():
        ids = batches[len(losses) % len(batches)]
        loss = forward(input_ids=ids, labels=ids).loss
        loss.backward()
        if args.gradients and not losses:
            save_gradients(model, f"{args.gradients}/{setting}.safetensors")
        torch.nn.utils.clip_grad_norm_(trained, s["maxGradNorm"])
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())

    def synchronize():
        if gpu:
            torch.cuda.synchronize()

    if gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    started = time.perf_counter()
    for _ in range(args.warm):
        step()
    synchronize()
    warm_seconds = time.perf_counter() - started
    # The host runs ahead of the device within a stretch, which suits PEFT best.
    seconds, stretch = [], max(1, args.steps // STRETCHES)
    while (left := args.warm + args.steps - len(losses)) > 0:
        count = min(stretch, left)
        started = time.perf_counter()
        for _ in range(count):
            step()
        synchronize()
        seconds.append((time.perf_counter() - started) / count)
    median = sorted(seconds)[len(seconds) // 2]
    row = {
        "system": "peft",
        "setting": setting,
        "tokensPerSecond": about["documents"] * about["tokens"] / median,
        "stepMs": median * 1e3,
        "stretchMs": [one * 1e3 for one in seconds],
    }
    if gpu:
        row["allocatorPeakGiB"] = torch.cuda.max_memory_allocated() / GIB
        row["reservedPeakGiB"] = torch.cuda.max_memory_reserved() / GIB
        row["driverGiB"] = (free_before - torch.cuda.mem_get_info()[0]) / GIB
    row["processGiB"] = status_bytes("VmRSS") / GIB
    row["processPeakGiB"] = status_bytes("VmHWM") / GIB
    row["loadSeconds"], row["warmSeconds"] = load_seconds, warm_seconds
    row["losses"] = [float(loss) for loss in losses]
    row["versions"] = {module.__name__: module.__version__ for module in (torch, transformers, peft)}
    return row


def measured(args, setting):
    """The row of a setting, or why there is none."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)
        try:
            row = run(args, setting)
        except BaseException as error:  # whatever it is, the other settings go on
            text = f"{type(error).__name__}: {error}".splitlines()[0][:300]
            row = {"system": "peft", "setting": setting, "error": text}
        with os.fdopen(write, "w") as pipe:
            pipe.write(json.dumps(row))
            pipe.flush()
        os._exit(0)
    os.close(write)

    def overdue(_signal, _frame):
        os.killpg(child, signal.SIGKILL)

    signal.signal(signal.SIGALRM, overdue)
    signal.alarm(args.limit)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    _, status = os.waitpid(child, 0)
    signal.alarm(0)
    if text:
        return json.loads(text)
    return {"system": "peft", "setting": setting, "error": f"ended with status {status} (limit {args.limit} s)"}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("case")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--settings", default="default")
    parser.add_argument("--warm", type=int, default=4)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--limit", type=int, default=150, help="seconds after which a setting is given up")
    parser.add_argument("--gradients", help="folder for the gradients of the first step")
    args = parser.parse_args()
    for setting in args.settings.split(","):
        print(json.dumps(measured(args, setting)), flush=True)


if __name__ == "__main__":
    main()
