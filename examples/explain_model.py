"""What fa4_inductor makes of each attention in a model, and where in the source it stands.

    python examples/explain_model.py [--model gpt_oss] [--attn eager]

Prints location, program, implementation, or the reason a site was left alone.
"""

import argparse

import torch
from rich.console import Console

import fa4_inductor
from fa4_inductor import model_zoo


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="gpt_oss", choices=model_zoo.names())
    parser.add_argument("--attn", default="eager", choices=("eager", "sdpa"))
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    case = model_zoo.build(args.model, args.attn, dtype=dtype, device=device)
    with torch.no_grad():
        report = fa4_inductor.explain(case.model, **case.inputs)
    Console(width=160).print(report.table())
    for site in report.sites:
        print(f"site {site.index} at {site.location}: {site.status}")
        print(f"    {site.program or site.reason}")


if __name__ == "__main__":
    main()
