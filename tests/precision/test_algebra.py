"""Every structure answers every question of the algebra as its dense matrix does."""

import copy
import pickle

import optree
import pytest
import torch

from bayesopt_chain.likelihoods._custom import semidefinite_root
from bayesopt_chain.precision import (
    Cholesky,
    Dense,
    Diagonal,
    Eigenbasis,
    Kronecker,
    LowRank,
    Root,
    Woodbury,
    Zero,
    flatten,
    low_rank_covariance,
    shape_only,
    unflatten,
)
from tests.refusals import refused

COUNT = torch.tensor(7.0, dtype=torch.float64)
TREES = {
    "dict": lambda: {"w": torch.randn(3, 2), "b": torch.randn(3), "s": torch.randn(())},
    "tuple": lambda: (torch.randn(2, 2), [torch.randn(())]),
    "bare": lambda: torch.randn(4),
    "matrix": lambda: torch.randn(2, 3),
}


def psd(n):
    root = torch.randn(n, n + 2)
    return root @ root.T


def each_leaf(function, tree):
    return optree.tree_map(function, tree)


def sides(leaf):
    return (leaf.shape[0], leaf.numel() // leaf.shape[0]) if leaf.ndim > 1 else (leaf.numel(), 1)


def dense(tree):
    return Dense(psd(flatten(tree, tree).numel()), shape_only(tree), COUNT)


def diagonal(tree):
    return Diagonal(each_leaf(lambda leaf: leaf.square() + 0.1, tree), COUNT)


def kronecker(tree):
    left, right = (each_leaf(lambda leaf, i=i: psd(sides(leaf)[i]), tree) for i in (0, 1))
    return Kronecker(left, right, each_leaf(lambda leaf: leaf.new_tensor(0.3), tree), shape_only(tree), COUNT)


def embedding(tree):
    factors = kronecker(tree)
    return factors._replace(left=each_leaf(lambda factor: factor.diagonal(), factors.left))


def low_rank(tree):
    rows = each_leaf(lambda leaf: torch.randn(2, *leaf.shape), tree)
    return LowRank(each_leaf(lambda leaf: leaf.square() + 0.1, tree), rows, COUNT)


STRUCTURES = {
    "diagonal": diagonal,
    "dense": dense,
    "cholesky": lambda tree: dense(tree).factorised(),
    "kronecker": kronecker,
    "kronecker with a diagonal factor": embedding,
    "eigenbasis": lambda tree: kronecker(tree).factorised(),
    "low_rank": low_rank,
    "woodbury": lambda tree: low_rank(tree).factorised(),
}
cases = pytest.mark.parametrize("tree", TREES.values(), ids=TREES)
structures = pytest.mark.parametrize("make", STRUCTURES.values(), ids=STRUCTURES)


pytestmark = pytest.mark.usefixtures("double_precision")


def assert_equal(a, b, tolerance=1e-10):
    assert torch.allclose(a, b, rtol=tolerance, atol=tolerance), (a - b).abs().max()


def draws_like(tree, *lead):
    return each_leaf(lambda leaf: torch.randn((*lead, *leaf.shape)), tree)


@pytest.fixture
def tree():
    """That of the tests which need no other."""
    return TREES["dict"]()


@cases
@structures
def test_its_answers_are_those_of_its_matrix(make, tree):
    tree = tree()
    precision = make(tree)
    matrix = precision.to_dense()
    for lead in ((), (3,), (2, 3)):
        x = draws_like(tree, *lead)
        flat = flatten(x, tree)
        assert_equal(flatten(precision.solve(x), tree), torch.linalg.solve(matrix, flat[..., None])[..., 0])
        assert_equal(precision.quad(x), torch.einsum("...i,ij,...j->...", flat, matrix, flat))
    assert_equal(flatten(precision.diag(), tree), matrix.diagonal())
    assert_equal(flatten(precision.inverse_diag(), tree), torch.linalg.inv(matrix).diagonal())
    assert_equal(precision.logdet(), torch.linalg.slogdet(matrix)[1])
    root = flatten(precision.sqrt_solve(unflatten(torch.eye(len(matrix)), tree)), tree)  # row i is R e_i
    assert_equal(root.T @ root, torch.linalg.inv(matrix))
    assert_equal(precision.scale(2.5).to_dense(), 2.5 * matrix)
    assert precision.scale(2.5).count == 2.5 * COUNT
    assert_equal(precision.add_diagonal(0.7).to_dense(), matrix + 0.7 * torch.eye(len(matrix)))
    numbers = each_leaf(lambda leaf: torch.rand(()), tree)
    spread = torch.cat([n.expand(leaf.numel()) for n, leaf in zip(*map(optree.tree_leaves, (numbers, tree)))])
    assert_equal(precision.add_diagonal(numbers).to_dense(), matrix + torch.diag(spread))


@pytest.mark.parametrize("make", [diagonal, dense, low_rank])
def test_a_whole_tree_of_prior_precisions_is_added(make, tree):
    prior = each_leaf(lambda leaf: torch.rand(leaf.shape), tree)
    precision = make(tree)
    assert_equal(precision.add_diagonal(prior).to_dense(), precision.to_dense() + torch.diag(flatten(prior, tree)))


@cases
@pytest.mark.parametrize("make", [diagonal, dense, STRUCTURES["cholesky"]])
def test_add_is_the_sum_of_matrices_and_of_counts(make, tree):
    tree = tree()
    a, b = make(tree), make(tree)
    total = a.add(b)
    assert_equal(total.to_dense(), a.to_dense() + b.to_dense())
    assert total.count == 14


def test_kronecker_factors_add_as_sums_over_data(tree):
    a, b = kronecker(tree), kronecker(tree)
    total = a.add(b)
    left, right = a.left["w"] + b.left["w"], a.right["w"] + b.right["w"]
    assert_equal(total.diag()["w"], (torch.outer(left.diagonal(), right.diagonal()) / 14 + 0.6))


@cases
def test_low_rank_sums_keep_the_diagonal_exactly_and_everything_within_the_rank(tree):
    tree = tree()
    a, b = low_rank(tree), low_rank(tree)
    total = a.add(b)
    assert_equal(flatten(total.diag(), tree), (a.to_dense() + b.to_dense()).diagonal())
    assert optree.tree_leaves(total.rows)[0].shape[0] == 2
    few = b._replace(rows=each_leaf(lambda row: 0 * row, b.rows))
    assert_equal(a.add(few).to_dense(), a.to_dense() + few.to_dense())


def test_low_rank_keeps_the_longest_directions():
    total = LowRank(torch.zeros(3), torch.zeros(2, 3), COUNT).add(Root(torch.tensor([3.0, 1.0, 2.0]).diag(), COUNT))
    assert_equal(total.to_dense(), torch.diag(torch.tensor([9.0, 1.0, 4.0])))
    assert_equal(total.diagonal, torch.tensor([0.0, 1.0, 0.0]))


def test_a_root_concatenates_and_becomes_low_rank_with_a_prior(tree):
    a, b = (Root(draws_like(tree, 3), COUNT) for _ in range(2))
    total = a.add(b)
    assert_equal(total.to_dense(), a.to_dense() + b.to_dense())
    with_prior = total.scale(0.5).add_diagonal(2.0)
    assert isinstance(with_prior, LowRank)
    matrix = total.to_dense() / 2 + 2 * torch.eye(len(total.to_dense()))
    assert_equal(with_prior.to_dense(), matrix)
    assert_equal(with_prior.logdet(), torch.linalg.slogdet(matrix)[1])
    x = draws_like(tree, 2)
    assert_equal(total.quad(x), torch.einsum("ni,ij,nj->n", flatten(x, tree), total.to_dense(), flatten(x, tree)))
    assert_equal(flatten(total.diag(), tree), total.to_dense().diagonal())


@pytest.mark.parametrize(
    ("make", "ask"),
    [
        (lambda rows: Root(rows, COUNT).add_diagonal(1e-3), "inverse_diag"),
        (lambda rows: low_rank_covariance(each_leaf(lambda row: 0 * row[0] + 1e-3, rows), rows, COUNT), "diag"),
    ],
    ids=["root", "covariance"],
)
def test_what_many_rows_determine_beside_a_weak_diagonal_keeps_its_digits_in_single_precision(tree, make, ask):
    """Rows outweigh the diagonal 6e8 times: double precision leaves about 1e-6 of what cancels, single precision nothing.

    Answers of a decomposition in double precision are compared with dense matrices above.
    """
    rows = each_leaf(lambda row: (100 * row).float(), draws_like(tree, 60))
    single, double = (make(each_leaf(cast, rows)) for cast in (torch.Tensor.float, torch.Tensor.double))
    torch.testing.assert_close(
        flatten(getattr(single, ask)(), tree).double(), flatten(getattr(double, ask)(), tree), rtol=1e-5, atol=0
    )


def test_zero_is_neutral_and_says_what_is_missing(tree):
    precision = dense(tree)
    zero = Zero(torch.tensor(0.0))
    assert zero.add(precision) is precision
    assert zero.scale(2.0).count == 0
    for question in (lambda: zero.solve(tree), zero.logdet, zero.diag, lambda: zero.quad(tree)):
        with pytest.raises(ValueError, match=r"update\(\.\.\., curvature=increment\)"):
            question()


@structures
def test_another_structure_or_tree_is_refused(make, tree):
    precision = make(tree)
    other = Root(draws_like(tree, 1), COUNT) if not isinstance(precision, (LowRank, Woodbury)) else diagonal(tree)
    for added, error, words in (
        (other, TypeError, "one posterior has one structure"),
        (make({**tree, "b": torch.zeros(2)}), ValueError, r"\bb\b"),
        (make({"w": tree["w"]}), ValueError, "with the structure of the params"),
    ):
        with pytest.raises(error, match=words):
            precision.add(added)


SINGULAR = {
    "diagonal": lambda: Diagonal({"a": torch.ones(2), "b": torch.zeros(2)}, COUNT),
    "dense": lambda: Dense(
        torch.diag(torch.tensor([1.0, 1.0, 0.0])), {"a": torch.zeros(2), "b": torch.zeros(1)}, COUNT
    ),
    "indefinite": lambda: Dense(
        torch.diag(torch.tensor([1.0, 1.0, -1.0])), {"a": torch.zeros(2), "b": torch.zeros(1)}, COUNT
    ),
    "kronecker": lambda: Kronecker(
        {"b": torch.zeros(2, 2)}, {"b": torch.ones(1, 1)}, {"b": torch.tensor(0.0)}, {"b": torch.zeros(2)}, COUNT
    ),
    "low_rank": lambda: LowRank({"b": torch.zeros(2)}, {"b": torch.ones(1, 2)}, COUNT),
}


OF_ANOTHER_SHAPE = {"w": torch.zeros(3, 2), "b": torch.zeros(4), "s": torch.zeros(())}
REFUSALS = [
    *(
        (lambda tree, make=make: make().factorised(), ValueError, r"\bb\b.*(prior_precision)")
        for make in SINGULAR.values()
    ),
    (lambda tree: Root(torch.ones(1, 2), COUNT).logdet(), ValueError, "prior_precision"),
    (lambda tree: kronecker(tree).add_diagonal(tree), ValueError, r"one number a parameter.*at b"),
    (
        lambda tree: kronecker(tree).factorised().add(kronecker(tree).factorised()),
        ValueError,
        "different eigenbases",
    ),
    (lambda tree: dense(tree).solve(OF_ANOTHER_SHAPE), ValueError, "at b has shape"),
    (lambda tree: diagonal(tree).as_rows(), TypeError, "Diagonal is not made of rows"),
    (lambda tree: SINGULAR["indefinite"]().as_rows(), ValueError, "indefinite"),
]


test_what_has_no_answer_is_refused_by_the_parameters_name = refused(
    REFUSALS,
    of=lambda call: call(TREES["dict"]()),
)


@structures
def test_a_precision_is_a_pytree_that_copies_pickles_and_vmaps(make, tree):
    precision = make(tree)
    for other in (
        copy.deepcopy(precision),
        pickle.loads(pickle.dumps(precision)),
        optree.tree_map(lambda t: t, precision),
    ):
        assert type(other) is type(precision)
        assert torch.equal(other.to_dense(), precision.to_dense())
    assert all(isinstance(leaf, torch.Tensor) for leaf in optree.tree_leaves(precision, none_is_leaf=True))
    others = [precision.scale(float(i + 1)) for i in range(3)]
    stacked = optree.tree_map(lambda *leaves: torch.stack(leaves), *others)
    solved = torch.vmap(lambda p: p.add_diagonal(1.0).factorised().solve(tree))(stacked)
    for i, other in enumerate(others):
        assert_equal(solved["w"][i], other.add_diagonal(1.0).solve(tree)["w"])


def test_mixed_dtypes_are_held_in_the_wider_and_returned_in_their_own():
    tree = {"a": torch.zeros(2, dtype=torch.float32), "b": torch.zeros(1, dtype=torch.float64)}
    solved = Dense(psd(3), tree, COUNT).solve(optree.tree_map(torch.ones_like, tree))
    assert (solved["a"].dtype, solved["b"].dtype) == (torch.float32, torch.float64)


def test_the_eigenbasis_class_of_a_factorised_kronecker_is_decomposed_once():
    precision = kronecker(TREES["dict"]()).factorised()
    assert isinstance(precision, Eigenbasis)
    assert precision.factorised() is precision
    assert isinstance(dense(TREES["bare"]()).factorised(), Cholesky)


def test_the_derivative_in_a_scale_is_exact_where_kronecker_factors_have_equal_eigenvalues():
    """Inputs that are constant give zero eigenvalues, here two of them. The oracle is the dense inverse."""
    tree = {"w": torch.randn(3, 4)}
    left = torch.diag(torch.tensor([1.0, 1.0, 2.0]))
    right = torch.zeros(4, 4)
    right[2:, 2:] = psd(2)
    data = Kronecker({"w": left}, {"w": right}, {"w": torch.tensor(0.0)}, shape_only(tree), COUNT)
    matrix, x = data.to_dense(), flatten(tree, tree)

    def exact(scale):
        inverse = torch.linalg.inv(scale * matrix + 0.3 * torch.eye(12))
        return torch.stack([inverse.diagonal().sum(), x @ inverse @ x, torch.linalg.slogdet(inverse)[1]])

    def found(scale):
        precision = data.scale(scale).add_diagonal(0.3).factorised()
        solved = flatten(precision.solve(tree), tree) @ x
        return torch.stack([flatten(precision.inverse_diag(), tree).sum(), solved, -precision.logdet()])

    scale = torch.tensor(1.7)
    assert_equal(found(scale), exact(scale))
    assert_equal(torch.autograd.functional.jacobian(found, scale), torch.autograd.functional.jacobian(exact, scale))


def test_a_scaled_kronecker_precision_adds_as_a_sum_over_data(tree):
    a, b = kronecker(tree), kronecker(tree)
    eager = a._replace(
        **{name: each_leaf(lambda leaf: 2.5 * leaf, getattr(a, name)) for name in ("left", "right", "diagonal")}
    )
    eager = eager._replace(data=2.5 * a.data, seen=2.5 * a.seen)
    assert_equal(a.scale(2.5).to_dense(), eager.to_dense())
    for total, expected in ((a.scale(2.5).add(b), eager.add(b)), (b.add(a.scale(2.5)), b.add(eager))):
        assert_equal(total.to_dense(), expected.to_dense())
        assert total.count == expected.count == 3.5 * COUNT


def test_an_eigenbasis_made_once_takes_scales_and_diagonals_and_one_in_the_same_basis(tree):
    data = kronecker(tree)
    once = data.eigenbasis()
    assert_equal(once.add(copy.deepcopy(once)).to_dense(), 2 * data.to_dense())
    assert_equal(once.scale(0.4).add_diagonal(2.0).to_dense(), data.scale(0.4).add_diagonal(2.0).to_dense())


ROWS = {"root": lambda tree: Root(draws_like(tree, 3), COUNT), "dense": dense, "cholesky": STRUCTURES["cholesky"]}


@pytest.mark.parametrize("make", ROWS.values(), ids=ROWS)
def test_rows_are_a_root_of_the_matrix(make, tree):
    precision = make(tree)
    rows = flatten(precision.as_rows(), tree)
    assert_equal(rows.T @ rows, precision.to_dense())


@pytest.mark.parametrize("name", ["diagonal", "eigenbasis", "dense", "woodbury"])
def test_a_lower_factor_is_that_of_the_matrix_or_absent(name):
    precision = STRUCTURES[name](TREES["dict"]()).factorised()
    factor = precision.lower_factor()
    if name != "dense":
        assert factor is None
        return
    assert_equal(factor, factor.tril())
    assert_equal(factor @ factor.mT, precision.to_dense())


@pytest.mark.parametrize("name", ["diagonal", "eigenbasis", "dense", "woodbury"])
def test_layer_bases_diagonalise_every_block_or_are_absent(name, tree):
    precision = STRUCTURES[name](tree)
    bases = precision.layer_bases()
    if name in ("dense", "woodbury"):
        assert bases is None
        return
    blocks = []
    for left, right, values in bases:
        basis = torch.eye(values.numel())
        if left is not None:
            full = [torch.diag(f) if f.ndim == 1 else f.contiguous() for f in (left, right)]
            basis = torch.kron(*full)
        blocks.append(basis * values.reshape(-1) @ basis.T)
    assert_equal(torch.block_diag(*blocks), precision.to_dense())


@pytest.mark.parametrize("fails", ["raises", "gives NaN"])
def test_a_decomposition_that_fails_in_float32_is_made_in_float64(monkeypatch, fails):
    """As MKL's does of some singular matrices: a low-rank sum, Kronecker factors and the root of a custom likelihood's Hessian
    are those of float64, to 1e-5."""
    rows, eigh = torch.randn(6, 5, dtype=torch.float64), torch.linalg.eigh

    def answers(dtype):
        x = rows.to(dtype)
        low_rank = LowRank(torch.ones(5, dtype=dtype), x[:2], COUNT).add(Root(x[2:], COUNT))
        kronecker = Kronecker(x.T @ x, x[:4] @ x[:4].T, torch.ones((), dtype=dtype), torch.zeros(5, 4), COUNT)
        root = semidefinite_root(x.T @ x, "custom")
        return [low_rank.inverse_diag(), kronecker.add_diagonal(1.0).inverse_diag(), root @ root.T]

    def failing(matrix):
        if matrix.dtype == torch.float64:
            return eigh(matrix)
        if fails == "raises":
            raise torch.linalg.LinAlgError("linalg.eigh: The algorithm failed to converge")
        return tuple(x * torch.nan for x in eigh(matrix))

    wanted = answers(torch.float64)
    monkeypatch.setattr(torch.linalg, "eigh", failing)
    for x, y in zip(answers(torch.float32), wanted):
        assert x.dtype == torch.float32
        torch.testing.assert_close(x.double(), y, rtol=1e-5, atol=1e-6)
