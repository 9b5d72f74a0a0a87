"""How many attention sites of Hugging Face models does a torch.compile backend fuse, and are the outputs still right?

Every model type of transformers that can be built tiny and random from its config class (no hub access) is run eagerly
under a mode that counts softmax(QK^T)V sites, then compiled with the backend and compared with the uncompiled run.
`python -m benchmarks.coverage --help` is the way in; `docs/supported.md` is written from its results.

    configs  tiny configs            sites     counting sites       measure   one model, in a process of its own
    inputs   inputs to try in turn   backends  what is measured     summary   totals for the terminal
    build    model and inputs        document  docs/supported.md    __main__  command line
"""
