"""What some notebooks need besides the extra ``notebooks``: data by their place in a folder, and packages."""

import importlib.util
import os
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "notebooks"
DATA = {
    "pima": "pima/pima-indians-diabetes.data.csv",
    "a_network_one_trusts": "mnist/mnist.npz",
    "imdb": "imdb/imdb_20k_100.npz",
    "continual_lora": "books",
    "bayesian_llama": "statements/statements.json",
    "adapters": "statements/statements.json",
}
PACKAGES = {
    "lightning": ["lightning"],
    "bayesian_optimisation": ["botorch"],
    "pima": ["pyro", "posteriors"],
    "a_network_one_trusts": ["torchmetrics", "sklearn"],
    "imdb": ["torchmetrics"],
    "continual_lora": ["transformers", "tokenizers", "peft"],
    "bayesian_llama": ["transformers", "tokenizers", "sklearn"],
    "adapters": ["transformers", "peft"],
}


def lacking(name: str) -> str:
    """What a notebook needs and is not here, in words; nothing if all is."""
    packages = [package for package in PACKAGES.get(name, []) if importlib.util.find_spec(package) is None]
    if packages:
        return f"needs the package {packages[0]}"
    data = os.environ.get("BAYESOPT_CHAIN_DATA", "")
    if name in DATA and not (data and (Path(data) / DATA[name]).exists()):
        return f"needs BAYESOPT_CHAIN_DATA, a folder with {DATA[name]}"
    return ""
