"""Boxes of several branches: cases solved by hand, and plain copies called one after another."""

import copy
import itertools
import math

import pytest
import torch
from helpers.detection_reference import DETECTOR
from torch import nn

import workbench
from workbench import augment, compose, laplace, neo, sample, sculpt, snapshot, vote
from workbench.core.outputs.detections import match, overlaps
from workbench.outputs import Detections, Values
from workbench.testing.models import build, inputs

BOX = [0.0, 0.0, 4.0, 4.0]


class Given(nn.Module):
    """Gives the detections of the list that its parameter numbers; voters are set to different ones."""

    def __init__(self, answers):
        super().__init__()
        self.number, self.answers = nn.Parameter(torch.zeros(1)), answers.__getitem__

    def forward(self, x):
        answer = self.answers(int(self.number))
        # a gradient for each score, as a network's have
        return [dict(image, scores=image["scores"] + 0 * self.number) for image in answer]


def image(*rows):
    """Detections of rows (corners, score, label)."""
    return {
        "boxes": torch.tensor([row[0] for row in rows], dtype=torch.float32).reshape(-1, 4),
        "labels": torch.tensor([row[2] for row in rows], dtype=torch.int64),
        "scores": torch.tensor([row[1] for row in rows], dtype=torch.float32),
    }


def wrapped_answers(*voters, option=None):
    """A wrapped model whose voters give these lists of images."""
    wrapped = vote.Wrapper(len(voters), output=option or Detections())(Given(list(voters))).eval()
    with torch.no_grad():
        next(iter(wrapped.risk_parameters())).copy_(torch.arange(float(len(voters)))[:, None])
    return wrapped


def entropy(p):
    return 0.0 if p in (0, 1) else -p * math.log(p) - (1 - p) * math.log(1 - p)


def answered(*voters):
    wrapped = wrapped_answers(*([v] for v in voters))
    y, risk = wrapped(torch.zeros(1), return_risk=True)
    return y[0], risk.epistemic[0], risk.aleatoric[0], risk.total[0]


def test_one_object_seen_by_all():
    y, epistemic, aleatoric, total = answered(
        image((BOX, 0.9, 1)), image(([0.0, 0.0, 4.0, 5.0], 0.7, 1)), image(([0.0, 0.0, 4.0, 3.0], 0.5, 1))
    )
    assert torch.allclose(y["boxes"], torch.tensor([BOX]))
    assert y["labels"].tolist() == [1]
    assert y["labels"].dtype == torch.int64
    assert torch.allclose(y["scores"], torch.tensor([0.7]))
    assert torch.allclose(epistemic["boxes"], torch.tensor([[0.0, 0.0, 0.0, math.sqrt(2 / 3)]]))
    assert torch.equal(epistemic["seen"], torch.ones(1))
    each = sum(map(entropy, (0.9, 0.7, 0.5))) / 3
    assert float(total["scores"]) == pytest.approx(entropy(0.7), abs=1e-6)
    assert float(aleatoric["scores"]) == pytest.approx(each, abs=1e-6)
    assert float(epistemic["scores"]) == pytest.approx(entropy(0.7) - each, abs=1e-6)
    assert aleatoric["boxes"] is None
    assert torch.equal(total["boxes"], epistemic["boxes"])
    assert epistemic["labels"] is None


def test_who_did_not_see_it_counts_as_a_score_of_zero():
    y, epistemic, _, total = answered(image((BOX, 0.9, 1)), image(), image((BOX, 0.6, 1)))
    assert torch.allclose(y["scores"], torch.tensor([0.5]))
    assert torch.allclose(epistemic["seen"], torch.tensor([2 / 3]))
    assert float(total["scores"]) == pytest.approx(math.log(2), abs=1e-6)
    assert torch.equal(y["boxes"], torch.tensor([BOX]))
    assert torch.equal(epistemic["boxes"], torch.zeros(1, 4))


def test_other_classes_are_other_objects_and_scores_sort():
    y, epistemic, _, _ = answered(image((BOX, 0.5, 1)), image((BOX, 0.9, 2)))
    assert y["labels"].tolist() == [2, 1]
    assert torch.allclose(y["scores"], torch.tensor([0.45, 0.25]))
    assert torch.equal(epistemic["seen"], torch.tensor([0.5, 0.5]))


def test_boxes_that_overlap_too_little_are_two_objects():
    shifted = [3.0, 0.0, 7.0, 4.0]  # overlap 1 / 7
    y, _, _, _ = answered(image((BOX, 0.9, 1)), image((shifted, 0.8, 1)))
    assert torch.equal(y["boxes"], torch.tensor([BOX, shifted]))
    wrapped = wrapped_answers([image((BOX, 0.9, 1))], [image((shifted, 0.8, 1))], option=Detections(iou=0.1))
    assert torch.equal(wrapped(torch.zeros(1))[0]["boxes"], torch.tensor([[1.5, 0.0, 5.5, 4.0]]))


def test_two_boxes_of_one_branch_stay_two_and_find_their_own():
    # a higher score in the other branch does not pull the wrong pair together
    a, b = [0.0, 0.0, 10.0, 10.0], [0.0, 0.0, 10.0, 12.5]
    y, _, _, _ = answered(image((a, 0.9, 1), (b, 0.75, 1)), image((b, 0.85, 1), (a, 0.8, 1)))
    assert torch.equal(y["boxes"], torch.tensor([a, b]))
    assert torch.allclose(y["scores"], torch.tensor([0.85, 0.8]))


def test_a_chain_of_overlaps_is_not_one_object():
    # neighbours overlap by 0.6, the ends by 1 / 3: their average with the pair in between is below 0.5
    boxes = [[0.0, 0.0, 4.0, 1.0], [1.0, 0.0, 5.0, 1.0], [2.0, 0.0, 6.0, 1.0]]
    assert overlaps(torch.tensor(boxes))[0].tolist() == pytest.approx([1, 0.6, 1 / 3])
    y, epistemic, _, _ = answered(*[image((box, score, 1)) for box, score in zip(boxes, (0.9, 0.8, 0.7), strict=True)])
    assert sorted(epistemic["seen"].tolist()) == pytest.approx([1 / 3, 2 / 3])
    assert y["boxes"][0].tolist() == [0.5, 0.0, 4.5, 1.0]


def test_nothing_at_all_and_images_without_boxes():
    wrapped = wrapped_answers([image(), image((BOX, 0.5, 1))], [image(), image()])
    y, risk = wrapped(torch.zeros(1), return_risk=True)
    assert y[0]["boxes"].shape == (0, 4)
    assert y[0]["scores"].shape == (0,)
    assert y[0]["labels"].dtype == torch.int64
    assert risk.epistemic[0]["seen"].shape == (0,)
    assert risk.epistemic[1]["seen"].tolist() == [0.5]
    y, risk = wrapped_answers([image()], [image()])(torch.zeros(1), return_risk=True)
    assert y[0]["boxes"].shape == (0, 4)
    assert risk.total[0]["scores"].shape == (0,)
    assert wrapped_answers([], [])(torch.zeros(1)) == []


def test_zero_boxes_may_have_no_columns():
    nothing = {"boxes": torch.empty(0), "labels": torch.empty(0, dtype=torch.int64), "scores": torch.empty(0)}
    y, _, _, _ = answered(image((BOX, 0.5, 1)), nothing)
    assert y["boxes"].tolist() == [BOX]
    assert y["scores"].tolist() == [0.25]


def random_images(seed, n_branches=4):
    draws = torch.Generator().manual_seed(seed)
    for _ in range(n_branches):
        n = int(torch.randint(0, 7, (), generator=draws))
        low = torch.randint(0, 6, (n, 2), generator=draws).float()
        size = torch.randint(1, 6, (n, 2), generator=draws).float()
        scores = torch.randint(1, 4, (n,), generator=draws) / 4  # many are equal
        yield torch.cat([low, low + size], 1), scores, torch.randint(0, 2, (n,), generator=draws)


@pytest.mark.parametrize("seed", range(8))
def test_the_order_of_the_branches_does_not_matter(seed):
    branches = list(random_images(seed))
    answers = [[dict(zip(("boxes", "scores", "labels"), branch, strict=True))] for branch in branches]
    y, risk = wrapped_answers(*answers)(torch.zeros(1), return_risk=True)
    for order in list(itertools.permutations(range(4)))[1::5]:
        other, other_risk = wrapped_answers(*[answers[i] for i in order])(torch.zeros(1), return_risk=True)
        for name in ("boxes", "scores", "labels"):
            assert torch.allclose(other[0][name], y[0][name])
        assert torch.allclose(other_risk.epistemic[0]["boxes"], risk.epistemic[0]["boxes"])
        assert torch.equal(other_risk.epistemic[0]["seen"], risk.epistemic[0]["seen"])


@pytest.mark.parametrize("seed", range(20))
def test_objects_are_as_a_plain_loop_over_all_clusters_finds_them(seed):
    boxes, scores, labels = (list(parts) for parts in zip(*random_images(seed, 3), strict=True))
    flat, flat_labels = torch.cat(boxes).double(), torch.cat(labels)
    branch = [k for k, part in enumerate(scores) for _ in part]
    iou = overlaps(flat)
    clusters = [[i] for i in range(len(flat))]
    while True:
        pairs = [
            (float(iou[a][:, b].mean()), a, b)
            for a, b in itertools.combinations(clusters, 2)
            if flat_labels[a[0]] == flat_labels[b[0]] and not {branch[i] for i in a} & {branch[i] for i in b}
        ]
        best = max(pairs, key=lambda pair: pair[0], default=(0.0, [], []))
        if best[0] < 0.5:
            break
        clusters = [c for c in clusters if c not in best[1:]] + [best[1] + best[2]]
    matched = match(boxes, scores, labels, 0.5)
    assert sorted(i for cluster in matched for i in cluster) == list(range(len(flat)))
    sizes = sorted(len(cluster) for cluster in matched)
    assert sizes == sorted(len(cluster) for cluster in clusters) or _ties(iou)


def _ties(iou):
    """Whether some overlaps are equal, so that a loop in another order may end elsewhere."""
    upper = iou[torch.triu_indices(len(iou), len(iou), 1).unbind()]
    return len(upper[upper >= 0.5].unique()) < int((upper >= 0.5).sum())


def suppressed(boxes, scores, iou=0.5):
    """Non-maximum suppression as everybody writes it."""
    order, keep = scores.argsort(descending=True), []
    while order.numel():
        best, order = order[0], order[1:]
        keep.append(best)
        order = order[overlaps(boxes)[best][order] < iou]
    return torch.stack(keep) if keep else order


class Detector(nn.Module):
    """Anchors at each pixel, a threshold and non-maximum suppression; in training a dict of losses."""

    def __init__(self, threshold=0.55):
        super().__init__()
        self.threshold = threshold
        self.body, self.score, self.offset = (
            nn.Conv2d(1, 4, 3, padding=1),
            nn.Conv2d(4, 2, 1),
            nn.Conv2d(4, 4, 1),
        )

    def forward(self, images, targets=None):
        results, losses = [], []
        for picture in images:
            h = self.body(picture[None]).tanh()
            scores = self.score(h)[0].sigmoid().flatten(1)
            y, x = torch.meshgrid(*(torch.arange(float(n)) for n in picture.shape[1:]), indexing="ij")
            centre, size = torch.stack([x, y], -1).flatten(0, 1), self.offset(h)[0].flatten(1).T.exp()
            boxes = torch.cat([centre - size[:, :2], centre + size[:, 2:]], 1)
            losses.append((scores.mean(), boxes.square().mean()))
            kept = []
            for label, score in enumerate(scores):
                some = score > self.threshold
                keep = suppressed(boxes[some], score[some])
                kept.append((boxes[some][keep], score[some][keep], torch.full((len(keep),), label + 1)))
            columns = [torch.cat(parts) for parts in zip(*kept, strict=True)]
            results.append(dict(zip(("boxes", "scores", "labels"), columns, strict=True)))
        if self.training:
            return {"scores": sum(a for a, _ in losses), "boxes": sum(b for _, b in losses)}
        return results


@pytest.fixture
def pictures():
    return [torch.rand(1, 5, 6), torch.rand(1, 4, 7)]


@pytest.mark.parametrize("strategy", ["auto", "loop", "tune"])
def test_a_detector_equals_a_plain_loop_over_its_voters(pictures, strategy):
    wrapped = vote.Wrapper(3, output=Detections(), strategy=strategy)(Detector()).eval()
    voters = [voter.eval() for voter in wrapped.voters()]
    y, risk = wrapped(pictures, return_risk=True)
    for i, result in enumerate(y):
        answers = [voter(pictures)[i] for voter in voters]
        rows = {name: torch.cat([answer[name] for answer in answers]) for name in result}
        columns = ([answer[name] for answer in answers] for name in ("boxes", "scores", "labels"))
        clusters = match(*columns, 0.5)
        assert len(clusters) == len(result["scores"])
        assert bool((result["scores"].diff() <= 1e-6).all())
        for k, cluster in enumerate(clusters):
            assert torch.allclose(result["boxes"][k], rows["boxes"][cluster].mean(0), atol=1e-5)
            assert torch.allclose(result["scores"][k], rows["scores"][cluster].sum() / 3, atol=1e-6)
            spread = rows["boxes"][cluster].std(0, correction=0)
            assert torch.allclose(risk.epistemic[i]["boxes"][k], spread, atol=1e-4)
            assert float(risk.epistemic[i]["seen"][k]) == pytest.approx(len(cluster) / 3)


def test_voters_that_are_equal_give_the_model_back(pictures):
    model = Detector(0.4).eval()
    y, risk = vote.Wrapper(3, finetune=True, output=Detections())(model).eval()(pictures, return_risk=True)
    for result, expected, spread in zip(y, model(pictures), risk.epistemic, strict=True):
        assert len(expected["scores"])
        order = expected["scores"].argsort(descending=True)
        for name, leaf in expected.items():
            assert torch.allclose(result[name].float(), leaf[order].float(), atol=1e-5)
        assert float(spread["boxes"].detach().abs().max()) < 1e-3
        assert torch.equal(spread["seen"], torch.ones(len(order)))


def test_in_training_the_losses_are_means(pictures):
    wrapped = vote.Wrapper(3, output=Detections())(Detector())
    losses = wrapped(pictures, [{}, {}])
    expected = [voter.train()(pictures) for voter in wrapped.voters()]
    for name, loss in losses.items():
        assert torch.allclose(loss, torch.stack([part[name] for part in expected]).mean(), atol=1e-5)
    sum(losses.values()).backward()
    assert all(float(p.grad.abs().sum()) > 0 for p in wrapped.risk_parameters())


@pytest.mark.parametrize(
    "wrapper",
    [
        sample.Wrapper(4, output=Detections()),
        compose(vote.Wrapper(2, output=Detections()), sample.Wrapper(2)),
        snapshot.Wrapper(3, output=Detections()),
    ],
    ids=["sample", "vote of sample", "snapshot"],
)
def test_other_wrappers_give_the_risks_of_boxes(pictures, wrapper):
    wrapped = wrapper(Detector(0.5))
    if collect := {snapshot.Wrapper: snapshot.collect}.get(type(wrapper)):
        for _ in range(3):
            with torch.no_grad():
                for p in wrapped.base_parameters():
                    p.add_(0.1 * torch.randn_like(p))
            collect(wrapped)
    wrapped.eval()
    y, risk = wrapped(pictures, return_risk=True)
    for result, spread, total, aleatoric in zip(y, risk.epistemic, risk.total, risk.aleatoric, strict=True):
        n = len(result["scores"])
        assert result["boxes"].shape == spread["boxes"].shape == (n, 4)
        assert spread["seen"].shape == (n,)
        assert torch.allclose(total["scores"], spread["scores"] + aleatoric["scores"], atol=1e-5)


def test_without_branches_the_prediction_is_the_models_own(pictures):
    model = Detector().eval()
    y, risk = compose().with_options(output=Detections())(model).eval()(pictures, return_risk=True)
    assert all(
        torch.equal(a[name], b[name]) for a, b in zip(y, model(pictures), strict=True) for name in ("boxes", "scores")
    )
    assert risk.names() == ("aleatoric", "total")


def test_other_names_containers_and_outputs_beside(pictures):
    class Beside(nn.Module):
        def __init__(self):
            super().__init__()
            self.detector, self.head = Detector(), nn.Linear(3, 2)

        def forward(self, images, x):
            detections = self.detector(images)
            return {"found": [(d["boxes"], d["labels"], d["scores"]) for d in detections], "features": self.head(x)}

    option = {"found": Detections(boxes=0, labels=1, scores=2), "features": Values()}
    wrapped = vote.Wrapper(3, output=option)(Beside()).eval()
    x = torch.randn(4, 3)
    y, risk = wrapped(pictures, x, return_risk=True)
    features = torch.stack([voter.eval()(pictures, x)["features"] for voter in wrapped.voters()])
    assert torch.allclose(y["features"], features.mean(0), atol=1e-6)
    assert torch.allclose(risk.epistemic["features"], features.std(0, correction=0), atol=1e-5)
    assert isinstance(y["found"][0], tuple)
    assert risk.epistemic["found"][0][0].shape == y["found"][0][0].shape
    assert risk.epistemic["found"][1]["seen"].shape == y["found"][1][2].shape


def test_masks_beside_boxes_are_averaged_and_labels_may_be_missing():
    def seen(score, level):
        return {"box": torch.tensor([BOX]), "score": torch.tensor([score]), "mask": torch.full((1, 2, 2), level)}

    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.number = nn.Parameter(torch.zeros(1))

        def forward(self, x):
            return seen(0.5, float(self.number)) | {"score": 0.5 + 0 * self.number}

    wrapped = vote.Wrapper(2, output=Detections("box", "score", None))(Masked()).eval()
    with torch.no_grad():
        next(iter(wrapped.risk_parameters())).copy_(torch.tensor([[0.0], [1.0]]))
    y, risk = wrapped(torch.zeros(1), return_risk=True)
    assert torch.equal(y["mask"], torch.full((1, 2, 2), 0.5))
    assert torch.equal(risk.epistemic["mask"], y["mask"])


def test_the_meaning_travels(pictures, tmp_path):
    option = {"*": Detections(iou=0.6)}
    wrapped = vote.Wrapper(3, output=option)(Detector()).eval()
    workbench.save(wrapped, tmp_path / "detector.safetensors")
    loaded = workbench.load(tmp_path / "detector.safetensors", Detector()).eval()
    assert loaded._workbench.output == option
    y = wrapped(pictures)
    for other in (loaded, copy.deepcopy(wrapped)):
        assert torch.equal(other(pictures)[0]["boxes"], y[0]["boxes"])
    assert repr(vote.Wrapper(2, output=Detections())) == f"vote.Wrapper(n_voters=2, output={Detections()!r})"


@pytest.mark.parametrize(
    ("voters", "words"),
    [
        ([image(([2.0, 2.0, 1.0, 1.0], 0.5, 1))], "corners"),
        ([image((BOX, 2.5, 1))], "sigmoid"),
        ([image((BOX, math.nan, 1))], "NaN"),
        ([{"boxes": torch.rand(3, 5), "scores": torch.rand(3), "labels": torch.ones(3)}], r"boxes \[k, 4\]"),
        ([{"boxes": torch.rand(3, 4), "scores": torch.rand(3), "classes": torch.ones(3)}], "returns no '0.labels'"),
        ([image((BOX, 0.5, 1)) | {"ids": torch.ones(1, dtype=torch.int64)}], "ids"),
        ([image((BOX, 0.5, 1)) | {"features": torch.rand(3, 8)}], "Values"),
    ],
)
def test_what_is_no_detection_is_refused(voters, words):
    with pytest.raises(ValueError, match=words):
        wrapped_answers(voters, voters)(torch.zeros(1))


@pytest.mark.parametrize("method", [sculpt, laplace, neo, augment])
def test_methods_that_cannot_stand_beside_boxes_are_refused_by_name(method):
    name = method.__name__.rpartition(".")[2]
    with pytest.raises(ValueError, match=f"{name} with output=Detections"):
        method.Wrapper(output=Detections())(Detector())
    with pytest.raises(ValueError, match=f"{name} with output=Detections"):
        method.Wrapper()(vote.Wrapper(2, output=Detections())(Detector()))


def test_options_are_checked():
    for options in ({"iou": 0}, {"iou": 1.5}, {"boxes": None}, {"scores": "boxes"}):
        with pytest.raises(ValueError, match="not"):
            Detections(**options)


def test_fit_and_predictive_say_what_to_do(pictures):
    wrapped = vote.Wrapper(2, output=Detections())(Detector())
    with pytest.raises(ValueError, match="train it in your own loop"):
        workbench.fit(wrapped, (torch.rand(8, 1, 4, 4), torch.rand(8)))
    with pytest.raises(ValueError, match="spread of their corners"):
        wrapped.predictive(pictures)


def test_boxes_and_scores_each_have_a_last_layer() -> None:
    """The scores choose the boxes, which are none of theirs for all that."""
    wrapped = vote.Wrapper(3, share=1, output=Detections(), example=inputs(DETECTOR)[0])(build(DETECTOR))
    one, other = (dict(voter.named_parameters()) for voter in wrapped.voters()[:2])
    assert {name for name in one if name.endswith("weight") and not torch.equal(one[name], other[name])} == {
        "size.weight",
        "score.weight",
    }
