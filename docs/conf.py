"""The documentation site: ``make docs`` builds it, with every warning an error."""

from __future__ import annotations

import importlib
import inspect
import shutil
import types
from pathlib import Path

from docutils import nodes
from latex2mathml.converter import convert

import bayesopt_chain

project = "bayesopt_chain"
author = "The bayesopt_chain authors"
version = release = bayesopt_chain.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
]
html_theme = "furo"
html_title = "bayesopt_chain"
html_static_path = ["_static"]
html_css_files = ["pages.css"]
html_show_copyright = False
html_math_renderer = "mathml"
exclude_patterns = ["_build", "jupyter_execute"]
templates_path: list[str] = []

myst_enable_extensions = ["dollarmath", "amsmath", "deflist", "colon_fence", "fieldlist"]
myst_heading_anchors = 3
nb_execution_mode = "off"  # notebooks are kept executed
nb_merge_streams = True
suppress_warnings = ["mystnb.unknown_mime_type"]

default_role = "literal"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_member_order = "bysource"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True  # an attribute that is a property too stands once
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

HERE = Path(__file__).parent
ROOT = HERE.parent
TITLES = {
    "bayesopt_chain": "Chains and loops",
    "links": "Links",
    "samplers": "Samplers",
    "optim": "torch.optim classes",
    "plot": "Pictures",
    "meta": "Differentiable optimizers",
    "gradients": "Gradient estimators",
    "posterior": "Laplace fits and predictions",
    "vi": "Variational inference",
    "ekf": "Kalman filters",
    "curvature": "Curvature",
    "likelihoods": "Likelihoods",
    "precision": "Precisions",
    "ensemble": "One call to a posterior",
    "diagnostics": "Diagnostics",
    "distributed": "Many ranks",
    "schedules": "Schedules",
    "response": "Responses",
    "testing": "Testing your own",
}


def public(module: types.ModuleType) -> list[str]:
    """The public names of a namespace that are no modules themselves."""
    names = getattr(module, "__all__", None) or [n for n in vars(module) if not n.startswith("_")]
    return [n for n in names if not isinstance(getattr(module, n), types.ModuleType)]


def write_api() -> None:
    """One page a namespace, made from its ``__all__``, so that no public name can be forgotten."""
    folder = HERE / "api"
    folder.mkdir(exist_ok=True)
    seen: dict[int, str] = {}
    toc = []
    for name, title in TITLES.items():
        module = bayesopt_chain if name == "bayesopt_chain" else getattr(bayesopt_chain, name, None)
        if module is None:
            continue
        module = importlib.import_module(module.__name__)
        prefix = "bayesopt_chain" if module is bayesopt_chain else f"bayesopt_chain.{name}"
        lines = [f"# {title}", "", f"`{prefix.replace('bayesopt_chain', 'bc', 1)}`", "", "```{eval-rst}"]
        summary = (module.__doc__ or "").strip()
        lines += [summary, ""] if summary and module is not bayesopt_chain else []
        for each in sorted(public(module), key=str.lower):
            value = getattr(module, each)
            if getattr(value, "__module__", "").split(".")[0] != "bayesopt_chain":
                continue
            if id(value) in seen:
                lines += [f"``{each}``: see :obj:`{seen[id(value)]}`.", ""]
                continue
            seen[id(value)] = f"{prefix}.{each}"
            kind = "class" if inspect.isclass(value) else "function" if callable(value) else "data"
            lines += [f".. auto{kind}:: {prefix}.{each}"]
            lines += ["   :members:", ""] if kind == "class" and not issubclass(value, tuple) else [""]
        lines += ["```", ""]
        page = folder / f"{name}.md"
        text = "\n".join(lines)
        if not page.exists() or page.read_text() != text:
            page.write_text(text)
        toc.append(name)
    index = "\n".join(["# Reference", "", "```{toctree}", ":maxdepth: 1", "", *toc, "```", ""])
    if not (folder / "index.md").exists() or (folder / "index.md").read_text() != index:
        (folder / "index.md").write_text(index)


def copy_pages() -> None:
    """The executed notebooks and the page of results, which live elsewhere, as pages of the site."""
    (HERE / "notebooks").mkdir(exist_ok=True)
    for source in sorted((ROOT / "notebooks").glob("*.ipynb")):
        shutil.copyfile(source, HERE / "notebooks" / source.name)
    shutil.copyfile(ROOT / "benchmarks" / "RESULTS.md", HERE / "results.md")


def setup(app) -> None:
    """Formulas are MathML, which browsers draw by themselves: no script, no network."""

    def drawn(display: str):
        def visit(self, node) -> None:
            self.body.append(convert(node.astext(), display=display))
            raise nodes.SkipNode

        return visit, None

    app.add_html_math_renderer("mathml", drawn("inline"), drawn("block"))


write_api()
copy_pages()
