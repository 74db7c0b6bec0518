"""The paired topology against the colocated one, on 2 or 4 GPUs of one host.

    python -m benchmarks.paired --gpus 2 --out FOLDER [--model SMOLLM2 --answers answers.json]
    python -m benchmarks.paired --quick

Parts, each in processes of its own and with a time limit of its own. With Qwen3-8B's shapes and
random weights, the trainer's own loop (rounds.py) at one global batch: colocated on one GPU and on
all, paired at every division of the GPUs; `of_best` compares with what the slower side would need
by itself, by the phases of one colocated GPU. Then a rank of a real training is killed, and the
training goes on. Where a real target and answers of it are given (benchmarks.short_training makes
them), one GPU and a pair learn the same.

What a part found lies in FOLDER/parts; a later call with the same FOLDER does only what is missing,
so that a run that is cut off has said something. `--quick`: tiny shapes over gloo on any machine,
and no goals of speed.
"""
