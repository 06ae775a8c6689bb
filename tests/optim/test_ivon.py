"""IVON as an optimizer: its equations, what it converges to, its state."""

import copy
import math

import pytest
import torch

import bayesopt_chain as bc

K = torch.tensor([4.0, 1.0, 0.25], dtype=torch.float64)


def made(params, **settings):
    generator = torch.Generator().manual_seed(1)
    return bc.optim.IVON(params, **{"lr": 0.1, "temperature": 0.01, "generator": generator, **settings})


def quadratic(theta):
    return 0.5 * (K * (theta - 1.0).square()).sum()


def step(optimizer, theta, loss=quadratic):
    optimizer.zero_grad()
    with optimizer.sampled():
        point = theta.detach().clone()
        loss(theta).backward()
    optimizer.step()
    return point


def follow(optimizer, theta, betas, decay, h):
    """Five steps beside those of the paper, from a mean of 0 and a Hessian of ``h``."""
    m, h, v = torch.zeros(3).double(), torch.full((3,), h).double(), torch.zeros(3).double()
    for t in range(1, 6):
        point = step(optimizer, theta)
        g, sigma2 = K * (point - 1.0), 0.01 / (h + decay)
        estimate = g * (point - m) / sigma2
        v = betas[0] * v + (1 - betas[0]) * g
        h = betas[1] * h + (1 - betas[1]) * estimate + 0.5 * (1 - betas[1]) ** 2 * (h - estimate).square() / (h + decay)
        m = m - 0.1 * (v / (1 - betas[0] ** t) + decay * m) / (h + decay)
        torch.testing.assert_close(theta.detach(), m, rtol=0, atol=1e-12)
        torch.testing.assert_close(optimizer.state[theta]["hessian"], h, rtol=0, atol=1e-10)


def test_a_step_is_that_of_the_paper():
    theta = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    optimizer = made([theta], betas=(0.8, 0.9), weight_decay=0.3, init_hessian=2.0, rescale_lr=False)
    follow(optimizer, theta, (0.8, 0.9), 0.3, 2.0)


@pytest.mark.slow
def test_it_finds_mean_and_variance_of_a_quadratic_posterior():
    """Closed form: mean k / (k + delta), variance T / (k + delta). 4,000 steps, beta2 0.999: relative error of h about 3 %."""
    theta = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    optimizer = made([theta], lr=0.02, betas=(0.9, 0.999), weight_decay=0.1)
    means = []
    for n in range(4_000):
        step(optimizer, theta)
        if n >= 2_000:
            means.append(theta.detach().clone())
    wanted = 0.01 / (K + 0.1)
    assert ((optimizer.variances()["0"] / wanted).log().abs() < math.log(1.25)).all()
    assert ((torch.stack(means).mean(0) - K / (K + 0.1)).abs() < 0.5 * wanted.sqrt()).all()


def test_draws_for_predictions_have_the_posteriors_variance_and_leave_the_means():
    """20,000 elements: the variance's standard error is 1 %."""
    theta = torch.ones(20_000, requires_grad=True)
    optimizer = made([theta], init_hessian=4.0)
    seen = []
    for number in (0, 1, 0):
        with optimizer.sampled(draw=number):
            seen.append(theta.detach().clone())
    assert torch.equal(seen[0], seen[2]) and not torch.equal(seen[0], seen[1])
    assert abs(seen[0].var() / (0.01 / 4.0) - 1) < 0.05 and torch.equal(theta, torch.ones(20_000))
    with pytest.raises(ValueError, match=r"inside of `with optimizer.sampled"):
        optimizer.step()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"temperature": 0.0}, r"temperature must be a number in \(0, 1e15\]"),
        ({"betas": (1.0, 0.9)}, "betas"),
        ({"init_hessian": -1.0}, r"init_hessian must be a number in \(0, 1e15\]"),
        ({"weight_decay": -1.0}, r"weight_decay must be a number in \[0, 1e15\]"),
    ],
)
def test_numbers_out_of_range_are_refused(settings, words):
    theta = torch.zeros(2, requires_grad=True)
    for call in (lambda: made([theta], **settings), lambda: made([{"params": [theta], **settings}])):
        with pytest.raises(ValueError, match=words):
            call()


@pytest.mark.parametrize("settings", [{"temperature": -1.0}, {"lr": float("nan")}, {"weight_decay": -1.0}], ids=str)
def test_numbers_that_leave_their_range_are_refused_before_a_draw(settings):
    theta = torch.zeros(2, requires_grad=True)
    optimizer = made([theta])
    optimizer.param_groups[0].update(settings)
    with pytest.raises(ValueError, match=f"{next(iter(settings))} must be a number"), optimizer.sampled():
        pass
    assert not theta.any()


def test_numbers_may_be_tensors():
    def walked(number):
        theta = torch.ones(2, requires_grad=True)
        given = {name: number(x) for name, x in (("temperature", 0.1), ("init_hessian", 2.0), ("weight_decay", 0.5))}
        optimizer = made([theta], generator=torch.Generator().manual_seed(0), **given)
        for _ in range(3):
            with optimizer.sampled():
                theta.grad = 2.0 * theta.detach()
            optimizer.step()
        return theta.detach()

    torch.testing.assert_close(walked(torch.tensor), walked(float))


def test_a_state_may_be_loaded_twice():
    """Torch adds a default to an optimizer that loads, of which no group knows."""
    optimizer = made([torch.zeros(2, requires_grad=True)])
    for _ in range(2):
        optimizer.load_state_dict(optimizer.state_dict())


def test_an_update_of_a_parameter_is_corrected_by_the_count_of_its_own():
    """A parameter whose gradients begin at the sixth step moves as one whose steps begin there, at the same draws."""
    theta, late = (torch.zeros(3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    optimizer = made([theta, late], betas=(0.9, 0.99))
    for _ in range(5):
        step(optimizer, theta)
    assert torch.equal(late, torch.zeros(3)) and optimizer.state[late]["step"] == 0

    follow(optimizer, late, (0.9, 0.99), 0.0, 1.0)


def test_what_is_frozen_before_its_first_update_is_a_constant_and_begins_when_it_is_released():
    body, head = torch.ones(4, requires_grad=True), torch.ones(4, requires_grad=True)
    body.requires_grad_(False)
    optimizer = made([("body", body), ("head", head)])
    for draw in (None, 0):
        with optimizer.sampled(draw=draw):
            assert torch.equal(body, torch.ones(4)) and not torch.equal(head, torch.ones(4))
            if draw is None:
                (body * head).square().sum().backward()
    optimizer.step()
    assert torch.equal(optimizer.variances()["body"], torch.zeros(4)) and optimizer.variances()["head"].gt(0).all()

    body.requires_grad_(True)
    with optimizer.sampled():
        assert not torch.equal(body, torch.ones(4))
        (body * head).square().sum().backward()
    optimizer.step()
    assert not torch.equal(body, torch.ones(4)) and optimizer.variances()["body"].gt(0).all()


def test_what_is_frozen_after_updates_keeps_its_posterior():
    """So do all parameters of a model that is switched to inference by ``requires_grad_(False)``."""
    theta = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    optimizer = made([theta])
    step(optimizer, theta)
    variances, mean = optimizer.variances()["0"], theta.detach().clone()
    theta.requires_grad_(False)
    assert torch.equal(optimizer.variances()["0"], variances)
    with optimizer.sampled(draw=0):
        assert not torch.equal(theta, mean)
    assert torch.equal(theta, mean)


def test_parameters_that_share_memory_are_refused_and_the_optimizer_stays_as_it_was():
    """A draw of the one would be kept as the mean of the other."""
    x = torch.zeros(3, requires_grad=True)
    optimizer = bc.optim.IVON([x], 0.1, temperature=1.0)
    with pytest.raises(ValueError, match="0 and 1 share memory"):
        optimizer.add_param_group({"params": [x.detach()[1:].requires_grad_()]})
    assert len(optimizer.param_groups) == 1


def test_draws_that_round_to_the_mean_are_said():
    narrow = torch.ones(3, dtype=torch.bfloat16, requires_grad=True)
    words = r"IVON\.sampled: most entries of a parameter in torch\.bfloat16 round to their mean"
    with pytest.warns(UserWarning, match=words), made([narrow], temperature=1e-8).sampled():
        pass


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_parameters_have_the_precision_of_float32_after_loading_too(dtype):
    def found(dtype):
        theta = torch.zeros(3, dtype=dtype, requires_grad=True)
        optimizer = made([theta], temperature=1e-2, betas=(0.9, 0.999))
        for k in range(200):
            if k == 100:
                saved = copy.deepcopy(optimizer.state_dict())
                optimizer = made([theta], temperature=1e-2, betas=(0.9, 0.999))
                optimizer.load_state_dict(saved)
            theta.grad = None
            with optimizer.sampled():
                (0.5 * K.to(dtype) * theta.square()).sum().backward()
            optimizer.step()
        return optimizer.state[theta]["hessian"]

    torch.testing.assert_close(found(dtype), found(torch.float32), rtol=0.03, atol=0.0)


def test_a_sparse_gradient_and_a_parameter_that_was_appended_are_refused_before_anything_moves():
    embedding, weight = torch.nn.Embedding(4, 2, sparse=True), torch.ones(3, requires_grad=True)
    optimizer = bc.optim.IVON([{"params": []}, {"params": [weight, *embedding.parameters()]}], 0.1, temperature=0.1)
    before = weight.detach().clone()
    with optimizer.sampled():
        (embedding(torch.tensor([1])).sum() + weight.sum()).backward()
    with pytest.raises(ValueError, match="sparse=False"):
        optimizer.step()
    assert torch.equal(weight, before) and not optimizer.state[weight]["momentum"].any()
    embedding.weight.grad = embedding.weight.grad.to_dense()
    optimizer.step()
    optimizer.param_groups[1]["params"].append(torch.ones(2, requires_grad=True))
    with pytest.raises(ValueError, match="add_param_group"), optimizer.sampled():
        pass
