"""Replays allocation traces with PyTorch's caching allocator and with cudaMallocAsync: allocator_trace.py TRACES.json

Run by allocator_trace.ts, which makes the traces. Prints one JSON object per allocator and trace: the most bytes that the
allocator held from the device. Needs a CUDA device. PyTorch chooses an allocator at its first allocation, so each runs in a
process of its own.
"""
import json
import os
import subprocess
import sys

ALLOCATORS = {
    "torch native": "backend:native",
    "torch expandable segments": "backend:native,expandable_segments:True",
    "cudaMallocAsync": "backend:cudaMallocAsync",
}


def replay(name, trace):
    import torch

    device = torch.device("cuda:0")
    torch.cuda.init()
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    live = {}
    for op in trace["ops"]:
        if op[0] == "a":
            live[op[1]] = torch.empty(op[2], dtype=torch.uint8, device=device)
        else:
            del live[op[1]]
    reserved = torch.cuda.max_memory_reserved(device)
    print(json.dumps({"allocator": name, "trace": trace["name"], "reserved": reserved}), flush=True)


def main():
    path = sys.argv[1]
    if len(sys.argv) == 3:
        with open(path, encoding="utf-8") as file:
            for trace in json.load(file):
                replay(sys.argv[2], trace)
        return
    for name, config in ALLOCATORS.items():
        environment = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": config, "PYTORCH_ALLOC_CONF": config}
        subprocess.run([sys.executable, __file__, path, name], env=environment, check=False)


if __name__ == "__main__":
    main()
