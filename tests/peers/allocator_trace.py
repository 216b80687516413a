"""Replays allocation traces with PyTorch's caching allocator and with cudaMallocAsync: allocator_trace.py TRACES.json

The traces come from allocator_trace.ts. Prints one JSON object per allocator and trace: the most bytes that the allocator
held from the device, and the excess over the most bytes that were live at once, in granules of 256. Needs a CUDA device.
Each allocator runs in a process of its own, as PyTorch chooses one at its first allocation.
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


def lower_bound(ops):
    sizes, live, most = {}, 0, 0
    for op in ops:
        if op[0] == "a":
            sizes[op[1]] = -(-op[2] // 256) * 256
            live += sizes[op[1]]
            most = max(most, live)
        else:
            live -= sizes[op[1]]
    return most


def replay(name, trace):
    import torch

    device = torch.device("cuda:0")
    torch.cuda.init()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    live = {}
    for op in trace["ops"]:
        if op[0] == "a":
            live[op[1]] = torch.empty(op[2], dtype=torch.uint8, device=device)
        else:
            del live[op[1]]
    reserved = torch.cuda.max_memory_reserved(device)
    least = lower_bound(trace["ops"])
    excess = f"{100 * (reserved / least - 1):.1f}"
    print(json.dumps({"allocator": name, "trace": trace["name"], "least": least, "reserved": reserved, "excess": excess}))


def main():
    path = sys.argv[1]
    if len(sys.argv) == 4:
        with open(path, encoding="utf-8") as file:
            replay(sys.argv[2], json.load(file)[int(sys.argv[3])])
        return
    with open(path, encoding="utf-8") as file:
        count = len(json.load(file))
    for name, config in ALLOCATORS.items():
        for index in range(count):
            environment = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": config, "PYTORCH_ALLOC_CONF": config}
            subprocess.run([sys.executable, __file__, path, name, str(index)], env=environment, check=True)


if __name__ == "__main__":
    main()
