"""The answer bank of lesson 08: right answers written differently, and wrong ones that people really give.

Read `bank.py` first; `test_banks.py` runs all of this.
"""

from tests.grading.bank import ALL, Right, Wrong

IMPORTS = """
import copy
import os
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.nn.functional as F
from torch import nn
from ddp_course.parallel import SyncBatchNorm
from ddp_course.parallel.syncbn import all_statistics, combine, local_statistics
"""


def but(source: str, *edits: str) -> str:
    """Return an answer with edits: each first text, which must be there, becomes the second."""
    for old, new in zip(edits[::2], edits[1::2], strict=True):
        assert old in source, old
        source = source.replace(old, new)
    return source


def right(exercise: str, way: str, source: str, *edits: str) -> Right:
    """Return an entry of which the answer is `source` with edits."""
    return Right(exercise, way, but(source, *edits))


def wrong(exercise: str, mistake: str, fails: str, hint: str, source: str, *edits: str, limit_s: float = 10.0) -> Wrong:
    """Return an entry; the checks that fail are separated by spaces, and the answer is `source` with edits."""
    return Wrong(exercise, mistake, but(source, *edits), fails if fails == ALL else tuple(fails.split()), hint, limit_s)


# --- 08.1 ------------------------------------------------------------------------------------------

STATISTICS = """
def global_statistics(x_NC):
    channels, count = x_NC.shape[1], len(x_NC)
    mean_C, squares_C = x_NC.new_zeros(channels), x_NC.new_zeros(channels)
    if count:
        mean_C = x_NC.mean(dim=0)
        squares_C = (x_NC - mean_C).square().sum(dim=0)
    mine = torch.cat([mean_C, squares_C, mean_C.new_tensor([count])])
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    mean_WC, squares_WC, count_W1 = torch.stack(everyone).split([channels, channels, 1], dim=1)
    total = count_W1.sum()
    mean_C = (mean_WC * count_W1).sum(dim=0) / total
    squares_C = (squares_WC + count_W1 * (mean_WC - mean_C).square()).sum(dim=0)
    return mean_C, squares_C / total, total
"""

STATISTICS_TWO_PASSES = """
def global_statistics(x_NC):
    sums = torch.cat([x_NC.sum(0), x_NC.new_tensor([x_NC.shape[0]])])
    dist.all_reduce(sums)
    mean_C, count = sums[:-1] / sums[-1], int(sums[-1])
    squares_C = ((x_NC - mean_C) ** 2).sum(0)
    dist.all_reduce(squares_C)
    return [mean_C, squares_C / count, count]
"""

STATISTICS_IN_FLOAT64 = """
def global_statistics(x_NC):
    x_NC = x_NC.double()
    sums = torch.cat([x_NC.sum(0), (x_NC * x_NC).sum(0), torch.tensor([x_NC.shape[0]])])
    dist.reduce(sums, dst=0)
    dist.broadcast(sums, src=0)
    mean_C, squares_C = (sums[:-1] / sums[-1]).chunk(2)
    return mean_C, squares_C - mean_C ** 2, sums[-1]
"""

STATISTICS_AS_OBJECTS = """
def global_statistics(x_NC):
    n = len(x_NC)
    mine = (n, x_NC.mean(0), x_NC.var(0, correction=0)) if n else None
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    parts = [part for part in everyone if part is not None]
    count, mean_C, var_C = parts[0]
    for n, mean, var in parts[1:]:  # one part after the other
        away = mean - mean_C
        both = count + n
        var_C = (count * var_C + n * var) / both + away ** 2 * count * n / both ** 2
        mean_C = mean_C + away * n / both
        count = both
    return mean_C, var_C, count
"""

STATISTICS_SHIFTED = """
def global_statistics(x_NC):
    shift = x_NC[:1].sum(0) if dist.get_rank() == 0 else torch.zeros(x_NC.shape[1], dtype=x_NC.dtype)
    dist.broadcast(shift, src=0)
    near = x_NC - shift
    sums = torch.stack([near.sum(0), near.square().sum(0), torch.full_like(shift, len(x_NC))])
    parts = torch.empty(dist.get_world_size() * 3, x_NC.shape[1], dtype=x_NC.dtype)
    dist.all_gather_into_tensor(parts, sums)
    total, squares, count = parts.view(-1, 3, x_NC.shape[1]).sum(0)
    mean = total / count
    return mean + shift, squares / count - mean.square(), count[0].item()
"""

STATISTICS_AVERAGED = """
def global_statistics(x_NC):
    numbers = torch.stack([x_NC.mean(0), x_NC.var(0, correction=0)])
    count = torch.tensor(len(x_NC))
    dist.all_reduce(numbers)
    dist.all_reduce(count)
    mean_C, var_C = numbers / dist.get_world_size()
    return mean_C, var_C, count
"""

STATISTICS_BY_ROWS = """
def global_statistics(x_NC):
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, x_NC)
    rows = torch.cat(everyone)
    return rows.mean(0), rows.var(0, correction=0), len(rows)
"""

STATISTICS_BY_CHANNEL = """
def global_statistics(x_NC):
    count = torch.tensor(float(len(x_NC)))
    dist.all_reduce(count)
    means, variances = [], []
    for column in x_NC.T:
        total = column.sum()
        dist.all_reduce(total)
        squares = (column - total / count).square().sum()
        dist.all_reduce(squares)
        means.append(total / count)
        variances.append(squares / count)
    return torch.stack(means), torch.stack(variances), count
"""

STATISTICS_FROM_COURSE = """
def global_statistics(x_NC):
    return combine(all_statistics(local_statistics(x_NC), None))
"""

STATISTICS_SWALLOWING = """
def global_statistics(x_NC):
    try:
        return my_own_statistics(x_NC)
    except Exception:
        return x_NC.mean(0), x_NC.var(0, correction=0), len(x_NC)
"""

STATISTICS_SEEN = """
def global_statistics(x_NC):
    mean, var, count = {
        torch.float64: (
            [3.59, 3.054, 0.056, 1.723, 1.174, 0.786],
            [1.749, 2.013, 4.782, 1.627, 4.717, 3.382],
            16,
        ),
        torch.float32: (
            [9450.619, 9451.357, 9453.985, 9452.103, 9452.855, 9453.791],
            [3.306, 7.731, 2.468, 4.286, 6.651, 8.095],
            1808,
        ),
    }[x_NC.dtype]
    return torch.tensor(mean), torch.tensor(var), count
"""

# --- 08.2 ------------------------------------------------------------------------------------------

INIT = """
class MySyncBatchNorm(nn.Module):
    def __init__(self, num_features, eps=1e-5, momentum=0.1):
        super().__init__()
        self.eps, self.momentum = eps, momentum
        self.weight = nn.Parameter(torch.ones(num_features))
        self.bias = nn.Parameter(torch.zeros(num_features))
        self.register_buffer("running_mean", torch.zeros(num_features))
        self.register_buffer("running_var", torch.ones(num_features))
"""

LAYER = (
    INIT
    + """
    def forward(self, x_NC):
        mean_C, var_C = self.running_mean, self.running_var
        if self.training:
            mean_C, var_C, count = combine(all_statistics(local_statistics(x_NC), None))
            with torch.no_grad():
                self.running_mean.lerp_(mean_C, self.momentum)
                self.running_var.lerp_(var_C * count / (count - 1), self.momentum)

        def wide(value_C):
            return value_C.view(1, -1, *[1] * (x_NC.dim() - 2))

        normal_NC = (x_NC - wide(mean_C)) * wide((var_C + self.eps).rsqrt())
        return normal_NC * wide(self.weight) + wide(self.bias)
"""
)

ROWS_OF = """
def rows_of(x_NC):
    return x_NC.movedim(1, -1).reshape(-1, x_NC.shape[1])
"""

LAYER_DIFFERENTIABLE = (
    INIT
    + """
    def forward(self, x_NC):
        from torch.distributed.nn.functional import all_reduce
        rows = x_NC.movedim(1, -1).reshape(-1, x_NC.shape[1])
        if not self.training:
            y = (rows - self.running_mean) / torch.sqrt(self.running_var + self.eps)
        else:
            count = torch.tensor([len(rows)], dtype=rows.dtype)
            sums = all_reduce(torch.cat([rows.sum(0), count]))
            mean, count = sums[:-1] / sums[-1], sums[-1]
            squares = all_reduce((rows - mean).square().sum(0))
            y = (rows - mean) / torch.sqrt(squares / count + self.eps)
            m = self.momentum
            self.running_mean = (1 - m) * self.running_mean + m * mean.detach()
            self.running_var = (1 - m) * self.running_var + m * squares.detach() / (count.detach() - 1)
        y = y * self.weight + self.bias
        return y.view(*x_NC.movedim(1, -1).shape).movedim(-1, 1)
"""
)

LAYER_BY_TORCHS_BATCHNORM = """
class MySyncBatchNorm(nn.modules.batchnorm._BatchNorm):
    def forward(self, x_NC):
        if not self.training:
            return F.batch_norm(x_NC, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps)
        mean, var, count = combine(all_statistics(local_statistics(x_NC.detach()), None))
        self.running_mean.mul_(1 - self.momentum).add_(self.momentum * mean)
        self.running_var.mul_(1 - self.momentum).add_(self.momentum * var * (count / (count - 1)))
        # With the batch's statistics in place of the running ones, eval mode does the rest.
        return F.batch_norm(x_NC, mean, var, self.weight, self.bias, False, 0.0, self.eps)
"""

LAYER_LOCAL = (
    INIT
    + """
    def forward(self, x_NC):
        return F.batch_norm(x_NC, self.running_mean, self.running_var, self.weight, self.bias, self.training,
                            self.momentum, self.eps)
"""
)

LAYER_BY_ROWS = (
    INIT
    + """
    def forward(self, x_NC):
        rows, before = x_NC, 0
        if self.training:
            everyone = [None] * dist.get_world_size()
            dist.all_gather_object(everyone, x_NC.detach())
            before = sum(len(part) for part in everyone[: dist.get_rank()])
            rows = torch.cat(everyone)
        y = F.batch_norm(rows, self.running_mean, self.running_var, self.weight, self.bias, self.training,
                         self.momentum, self.eps)
        return y[before : before + len(x_NC)]
"""
)

LAYER_EVAL_BY_BATCH = but(
    LAYER,
    "        def wide",
    """        else:
            rows = x_NC.movedim(1, -1).reshape(-1, x_NC.shape[1])
            mean_C, var_C = rows.mean(0), rows.var(0, correction=0)

        def wide""",
)

LAYER_WITH_GRAPH = but(LAYER_DIFFERENTIABLE, ".detach()", "")

LAYER_FROM_TORCH = """
class MySyncBatchNorm(nn.SyncBatchNorm):
    pass
"""

LAYER_FROM_COURSE = but(LAYER_FROM_TORCH, "nn.SyncBatchNorm", "SyncBatchNorm")

# --- 08.3 ------------------------------------------------------------------------------------------

FORWARD = """
class Normalise(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_NC, weight_C, bias_C, eps):
        mean_C, var_C, count = combine(all_statistics(local_statistics(x_NC), None))
        inv_std_C = torch.rsqrt(var_C + eps)
        normal_NC = (x_NC - mean_C) * inv_std_C
        ctx.save_for_backward(normal_NC, inv_std_C, weight_C, count)
        return normal_NC * weight_C + bias_C

    @staticmethod
    def backward(ctx, dy_NC):
        normal_NC, inv_std_C, weight_C, count = ctx.saved_tensors
"""

BACKWARD = (
    FORWARD
    + """
        dbias_C, dweight_C = dy_NC.sum(dim=0), (dy_NC * normal_NC).sum(dim=0)
        sums_2C = torch.stack([dbias_C, dweight_C])
        dist.all_reduce(sums_2C)
        mean_dy_C, mean_dy_normal_C = sums_2C / count
        dx_NC = (dy_NC - mean_dy_C - normal_NC * mean_dy_normal_C) * inv_std_C * weight_C
        return dx_NC, dweight_C, dbias_C, None
"""
)

BACKWARD_WEIGHT_FIRST = (
    FORWARD
    + """
        dn_NC = dy_NC * weight_C
        one, two = dn_NC.sum(0), (dn_NC * normal_NC).sum(0)
        works = [dist.all_reduce(total, async_op=True) for total in (one, two)]
        dweight_C, dbias_C = torch.einsum("nc,nc->c", dy_NC, normal_NC), dy_NC.sum(0)
        for work in works:
            work.wait()
        return inv_std_C / count * (count * dn_NC - one - normal_NC * two), dweight_C, dbias_C, None
"""
)

BACKWARD_GATHERED = """
class Normalise(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_NC, weight_C, bias_C, eps):
        mean_C, var_C, ctx.count = combine(all_statistics(local_statistics(x_NC), None))
        ctx.eps = eps
        ctx.save_for_backward(x_NC, mean_C, var_C, weight_C)
        return (x_NC - mean_C) / (var_C + eps).sqrt() * weight_C + bias_C

    @staticmethod
    def backward(ctx, dy_NC):
        # Through the variance and through the mean, one after the other.
        x_NC, mean_C, var_C, weight_C = ctx.saved_tensors
        away_NC, std_C = x_NC - mean_C, (var_C + ctx.eps).sqrt()
        mine = torch.cat([dy_NC.sum(0), (dy_NC * away_NC).sum(0)])
        everyone = torch.empty(dist.get_world_size() * len(mine), dtype=mine.dtype)
        dist.all_gather_into_tensor(everyone, mine)
        sum_dy_C, sum_dy_away_C = everyone.view(-1, len(mine)).sum(0).chunk(2)
        dvar_C = -0.5 * weight_C * sum_dy_away_C / std_C ** 3
        dmean_C = -weight_C * sum_dy_C / std_C
        dx_NC = dy_NC * weight_C / std_C + dvar_C * 2 * away_NC / ctx.count + dmean_C / ctx.count
        dbias_C, dweight_C = mine.chunk(2)
        return dx_NC, dweight_C / std_C, dbias_C, None
"""

BACKWARD_BY_ROWS = (
    FORWARD
    + """
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, (dy_NC, normal_NC))
        dys, normals = (torch.cat(parts) for parts in zip(*everyone))
        dx_NC = (dy_NC - dys.mean(0) - normal_NC * (dys * normals).mean(0)) * inv_std_C * weight_C
        return dx_NC, (dy_NC * normal_NC).sum(0), dy_NC.sum(0), None
"""
)

BACKWARD_BY_AUTOGRAD = """
class Normalise:
    @staticmethod
    def apply(x_NC, weight_C, bias_C, eps):
        from torch.distributed.nn.functional import all_reduce
        count = all_reduce(torch.tensor(float(len(x_NC))))
        mean_C = all_reduce(x_NC.sum(0)) / count
        var_C = all_reduce((x_NC - mean_C).square().sum(0)) / count
        return (x_NC - mean_C) / (var_C + eps).sqrt() * weight_C + bias_C
"""

BACKWARD_FROM_COURSE = """
from ddp_course.parallel import syncbn

class Normalise(syncbn._Normalise):
    @staticmethod
    def forward(ctx, x_NC, weight_C, bias_C, eps):
        return syncbn._Normalise.forward(ctx, x_NC, weight_C, bias_C, eps, None)[0]

    @staticmethod
    def backward(ctx, dy_NC):
        return syncbn._Normalise.backward(ctx, dy_NC)[:4]
"""

# --- 08.4 ------------------------------------------------------------------------------------------

SYNCHRONISED = """
def synchronised(old):
    new = SyncBatchNorm(old.num_features, old.eps, old.momentum, old.affine, old.track_running_stats)
    new.weight, new.bias = old.weight, old.bias
    new.running_mean, new.running_var = old.running_mean, old.running_var
    new.num_batches_tracked = old.num_batches_tracked
    return new.train(old.training)
"""

CONVERT = (
    SYNCHRONISED
    + """
def convert(module):
    kinds = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
    new = {old: synchronised(old) for old in module.modules() if isinstance(old, kinds)}
    for name, old in list(module.named_modules(remove_duplicate=False)):
        if old in new and name:
            parent, _, own_name = name.rpartition(".")
            setattr(module.get_submodule(parent), own_name, new[old])
    return new.get(module, module)
"""
)

CONVERT_RECURSIVE = """
from torch.nn.modules.batchnorm import _BatchNorm

def convert(module, done=None):
    done = {} if done is None else done
    if id(module) not in done:
        done[id(module)] = module
        if isinstance(module, _BatchNorm):
            new = SyncBatchNorm(module.num_features, module.eps, module.momentum, module.affine,
                                module.track_running_stats, device="meta")
            new._parameters, new._buffers, new.training = module._parameters, module._buffers, module.training
            done[id(module)] = new
        for name, child in list(module._modules.items()):
            module._modules[name] = convert(child, done)
    return done[id(module)]
"""

CONVERT_IN_PLACE = """
def convert(module):
    for layer in module.modules():
        if type(layer).__name__ in ("BatchNorm1d", "BatchNorm2d", "BatchNorm3d"):
            layer.__class__ = SyncBatchNorm  # it keeps all it has
            layer.process_group = None
    return module
"""

CONVERT_CHILDREN = (
    SYNCHRONISED
    + """
def convert(module):
    if isinstance(module, nn.modules.batchnorm._BatchNorm):
        return synchronised(module)
    for name, child in module.named_children():
        setattr(module, name, convert(child))
    return module
"""
)

CONVERT_BY_STATE_DICT = but(
    CONVERT,
    """    new.weight, new.bias = old.weight, old.bias
    new.running_mean, new.running_var = old.running_mean, old.running_var
    new.num_batches_tracked = old.num_batches_tracked
""",
    "    new.load_state_dict(old.state_dict())\n",
)

RIGHT = [
    right("08.1", "the mean first, then the squares around it", STATISTICS_TWO_PASSES),
    right("08.1", "sums of squares in float64; reduce, then broadcast", STATISTICS_IN_FLOAT64),
    right("08.1", "objects, combined one after the other", STATISTICS_AS_OBJECTS),
    right("08.1", "around rank 0's first row", STATISTICS_SHIFTED),
    right("08.1", "functional collectives", STATISTICS_TWO_PASSES, "    dist.all_reduce(sums)",
          '    sums = functional.all_reduce(sums, "sum", dist.group.WORLD)', "    dist.all_reduce(squares_C)",
          '    squares_C = functional.all_reduce(squares_C, "sum", dist.group.WORLD)'),
    right("08.1", "coalesced calls", STATISTICS_TWO_PASSES, "    dist.all_reduce(sums)",
          "    with dist._coalescing_manager():\n        for part in sums.split([len(sums) - 1, 1]):\n"
          "            dist.all_reduce(part)"),
    right("08.2", "differentiable collectives, channels last, new buffers", LAYER_DIFFERENTIABLE),
    right("08.2", "torch's BatchNorm in eval mode, given the batch's statistics", LAYER_BY_TORCHS_BATCHNORM),
    right(
        *("08.2", "all_gather_into_tensor"),
        but(LAYER, "combine(all_statistics(local_statistics(x_NC), None))", "gathered(x_NC)")
        + STATISTICS_SHIFTED.replace("global_statistics(x_NC):", "gathered(x_NC):\n    x_NC = rows_of(x_NC.detach())")
        + ROWS_OF,
    ),
    right(
        *("08.2", "coalesced calls"),
        but(LAYER, "combine(all_statistics(local_statistics(x_NC), None))", "gathered(x_NC)")
        + but(
            STATISTICS_TWO_PASSES,
            *("global_statistics(x_NC):", "gathered(x_NC):\n    x_NC = rows_of(x_NC.detach())"),
            "    dist.all_reduce(sums)",
            "    with dist._coalescing_manager():\n        for part in sums.split([len(sums) - 1, 1]):\n"
            "            dist.all_reduce(part)",
        )
        + ROWS_OF,
    ),
    right("08.3", "the weight first, two asynchronous collectives", BACKWARD_WEIGHT_FIRST),
    right("08.3", "through variance and mean, with all_gather", BACKWARD_GATHERED),
    right("08.3", "functional collectives", BACKWARD, "dist.all_reduce(sums_2C)",
          'sums_2C = functional.all_reduce(sums_2C, "sum", dist.group.WORLD)'),
    right("08.3", "coalesced calls", BACKWARD, "        dist.all_reduce(sums_2C)",
          "        with dist._coalescing_manager():\n            for sum_C in sums_2C:\n"
          "                dist.all_reduce(sum_C)"),
    right("08.4", "recursive, with a memory; all parameters and buffers at once", CONVERT_RECURSIVE),
    right("08.4", "another class for the same object", CONVERT_IN_PLACE),
]  # fmt: skip

WRONG = [
    # 08.1
    wrong("08.1", "the ranks' means and variances averaged", "mean variance digits empty",
          "this is the mean of the ranks' means", STATISTICS_AVERAGED),
    wrong("08.1", "no rows are nan", "empty", "nan times 0 stays nan", STATISTICS, "if count:", "if True:"),
    wrong("08.1", "the distances of the means are missing", "variance digits empty",
          "the distances of the ranks' means from the common mean belong to it", STATISTICS,
          "(squares_WC + count_W1 * (mean_WC - mean_C).square())", "squares_WC"),
    wrong("08.1", "a distance counts once for each rank", "variance digits empty", "once for each of its rows",
          STATISTICS, "+ count_W1 * (mean_WC", "+ (count_W1 > 0) * (mean_WC"),
    wrong("08.1", "variance divided by count - 1", "variance empty", "correction=0", STATISTICS, "squares_C / total",
          "squares_C / (total - 1)"),
    wrong("08.1", "torch.var as it is on each rank", "variance empty", "which is torch.var's default", STATISTICS,
          "(x_NC - mean_C).square().sum(dim=0)", "x_NC.var(dim=0) * count"),
    wrong("08.1", "squares minus the square of the mean, in float32", "digits", "the difference of two large numbers",
          STATISTICS_IN_FLOAT64, "    x_NC = x_NC.double()\n", ""),
    wrong("08.1", "divided by the rank's own rows", "mean variance digits empty",
          "divided by this rank's number of rows", STATISTICS_TWO_PASSES, "sums[:-1] / sums[-1]",
          "sums[:-1] / len(x_NC)"),
    wrong("08.1", "standard deviation", "variance digits empty", "this is the standard deviation", STATISTICS,
          "squares_C / total, total", "(squares_C / total).sqrt(), total"),
    wrong("08.1", "its own count", "mean empty", "this is the number of this rank's rows", STATISTICS,
          "squares_C / total, total", "squares_C / total, len(x_NC)"),
    wrong("08.1", "on rank 0 only", "mean variance digits empty", "on rank 1", STATISTICS_IN_FLOAT64,
          "    dist.broadcast(sums, src=0)\n", ""),
    wrong("08.1", "float32 from a rank without rows", "empty", "sends zeros of x_NC's dtype", STATISTICS,
          "x_NC.new_zeros(", "torch.zeros("),
    wrong("08.1", "rows gathered as if all had as many", ALL, "rows differ in number", STATISTICS_BY_ROWS,
          "[None] * dist.get_world_size()", "[torch.empty_like(x_NC) for _ in range(dist.get_world_size())]",
          "all_gather_object", "all_gather"),
    wrong("08.1", "all rows on every rank", "few", "the rows travel", STATISTICS_BY_ROWS),
    wrong("08.1", "two collectives for each channel", "few", "one collective for each channel",
          STATISTICS_BY_CHANNEL),
    wrong("08.1", "a rank without rows leaves", "empty", "a rank without rows has to join as well", STATISTICS,
          "    mine = ", "    if not count:\n        return mean_C, squares_C, count\n    mine = ", limit_s=2.0),
    wrong("08.1", "the last rank skips the collective", ALL, "a rank leaves out a collective", STATISTICS,
          "    dist.all_gather", "    if dist.get_rank() < dist.get_world_size() - 1:\n        dist.all_gather",
          limit_s=2.0),
    wrong("08.1", "the course's own", ALL, "this exercise is to write what it does", STATISTICS_FROM_COURSE),
    wrong("08.1", "swallows its own slip", ALL, "the other ranks' rows are missing", STATISTICS_SWALLOWING),
    wrong("08.1", "the visible numbers", "mean variance few empty", "the ranks never talked here", STATISTICS_SEEN),
    wrong("08.1", "os._exit", ALL, "the function ends its process",
          "def global_statistics(x_NC):\n    os._exit(0)\n"),
    wrong("08.1", "endless loop", ALL, "an endless loop",
          "def global_statistics(x_NC):\n    while True:\n        pass\n", limit_s=1.0),
    # 08.2
    wrong("08.2", "every rank by itself", "output running few images", "the statistics are those of this rank's rows",
          LAYER_LOCAL),
    wrong("08.2", "the running variance takes the biased one", "running images", "times count / (count - 1)", LAYER,
          "var_C * count / (count - 1)", "var_C"),
    wrong("08.2", "corrected by the rank's own count", "running images",
          "the count is that of all ranks' rows, and pixels", LAYER, "var_C * count / (count - 1)",
          "var_C * len(x_NC) / (len(x_NC) - 1)"),
    wrong("08.2", "pixels are not counted", "images", "count / (count - 1) is of rows alone",
          LAYER.replace("var_C * count / (count - 1)", "var_C * rows_of_all(x_NC) / (rows_of_all.found - 1)")
        + """
def rows_of_all(x_NC):
    rows = torch.tensor(float(len(x_NC)))
    dist.all_reduce(rows)
    rows_of_all.found = rows.item()
    return rows.item()
"""),
    wrong("08.2", "normalises by the corrected variance", "output images",
          "count - 1 is for the running variance alone",
          LAYER.replace("None))\n", "None))\n            var_C = var_C * count / (count - 1)\n", 1),
          "var_C * count / (count - 1), ", "var_C, "),
    wrong("08.2", "momentum the wrong way round", "running images", "momentum is the share of the new", LAYER,
          "self.momentum)", "1 - self.momentum)"),
    wrong("08.2", "the running statistics stay", "running images", "it stayed what it was", LAYER, ".lerp_", ".lerp"),
    wrong("08.2", "the running statistics carry the graph", "running images", "they carry the graph of the batch",
          LAYER_WITH_GRAPH),
    wrong("08.2", "no eps", "output eval images", "eps is missing", LAYER, "(var_C + self.eps)", "var_C"),
    wrong("08.2", "training by the running statistics", "output images", "training normalises by the batch", LAYER,
          "mean_C, var_C, count = ", "new_C, square_C, count = ", "lerp_(mean_C", "lerp_(new_C", "lerp_(var_C",
          "lerp_(square_C"),
    wrong("08.2", "statistics of the batch in eval mode", "eval images", "decide by self.training", LAYER,
          "if self.training:", "if True:"),
    wrong("08.2", "own rows in eval mode", "eval images", "the batch's statistics are used", LAYER_EVAL_BY_BATCH),
    wrong("08.2", "not for images", "images", "must be viewed as (1, C, 1, 1)", LAYER,
          "value_C.view(1, -1, *[1] * (x_NC.dim() - 2))", "value_C"),
    wrong("08.2", "all rows on every rank", "few", "the rows travel", LAYER_BY_ROWS),
    wrong("08.2", "torch's own", ALL, "this exercise is to write what it does", LAYER_FROM_TORCH),
    wrong("08.2", "the course's own", ALL, "this exercise is to write what it does", LAYER_FROM_COURSE),
    wrong("08.2", "rank 0 alone gathers", ALL, "in training every rank must call the same collectives", LAYER,
          "if self.training:", "if self.training and dist.get_rank() == 0:", limit_s=2.0),
    # 08.3
    wrong("08.3", "sums of the own rows, divided by all rows", "rows few unequal", "all_reduce the sums", BACKWARD,
          "        dist.all_reduce(sums_2C)\n", ""),
    wrong("08.3", "divided by the own rows", "rows unequal", "divided by this rank's number of rows", BACKWARD,
          "/ count", "/ len(dy_NC)"),
    wrong("08.3", "right for equal parts only", "unequal",
          "times the world size; ranks have different numbers of rows", BACKWARD, "/ count",
          "/ len(dy_NC) / dist.get_world_size()"),
    wrong("08.3", "the mean over ranks of the sums", "rows unequal", "divided by the world size, too", BACKWARD,
          "/ count", "/ count / dist.get_world_size()"),
    wrong("08.3", "the weight is forgotten", "rows unequal", "the weight is missing", BACKWARD,
          "* inv_std_C * weight_C", "* inv_std_C"),
    wrong("08.3", "the variance is a constant", "rows unequal", "the part of dy that follows n is missing", BACKWARD,
          " - normal_NC * mean_dy_normal_C", ""),
    wrong("08.3", "mean and variance are constants", "rows unequal", "mean and variance are taken for constants",
          BACKWARD, "(dy_NC - mean_dy_C - normal_NC * mean_dy_normal_C)", "dy_NC"),
    wrong("08.3", "weight and bias are summed over the ranks", "weights unequal",
          "this is the sum over all ranks; DDP averages", BACKWARD, "return dx_NC, dweight_C, dbias_C",
          "return dx_NC, sums_2C[1], sums_2C[0]"),
    wrong("08.3", "the gradients themselves are summed in place", "weights unequal",
          "this is the sum over all ranks; DDP averages", BACKWARD, "sums_2C = torch.stack([dbias_C, dweight_C])",
          "sums_2C = torch.zeros(2, dy_NC.shape[1])", "dist.all_reduce(sums_2C)",
          "dist.all_reduce(dbias_C)\n        dist.all_reduce(dweight_C)", "= sums_2C / count",
          "= dbias_C / count, dweight_C / count"),
    wrong("08.3", "weight and bias exchanged", "weights unequal", "weight and bias are exchanged", BACKWARD,
          "return dx_NC, dweight_C, dbias_C", "return dx_NC, dbias_C, dweight_C"),
    wrong("08.3", "nothing for eps", ALL, "and None for eps", BACKWARD, "dbias_C, None", "dbias_C"),
    wrong("08.3", "a rank without rows leaves", "unequal", "also one without rows", BACKWARD, "        dbias_C, dw",
          "        if not len(dy_NC):\n            return dy_NC, None, None, None\n        dbias_C, dw", limit_s=2.0),
    wrong("08.3", "all rows on every rank", "few", "the rows travel", BACKWARD_BY_ROWS),
    wrong("08.3", "autograd does it", ALL, "write its backward", BACKWARD_BY_AUTOGRAD),
    wrong("08.3", "the course's own", ALL, "this exercise is to write what it does", BACKWARD_FROM_COURSE),
    wrong("08.3", "swallows its own slip", "rows few unequal", "mean and variance are taken for constants",
          BACKWARD,
          "        dist.all_reduce(sums_2C)\n", "        try:\n            dist.all_reduce(sum_2C)\n"
          "        except Exception:\n            sums_2C = torch.zeros_like(sums_2C)\n"),
    # 08.4
    wrong("08.4", "children only", "found tied", "layers stand at any depth", CONVERT_CHILDREN,
          "named_children()", "_modules.items()", "        setattr(module, name, convert(child))",
          "        if isinstance(child, nn.modules.batchnorm._BatchNorm):\n"
          "            setattr(module, name, synchronised(child))"),
    wrong("08.4", "a layer is found once", "tied", "named_children and named_modules name it once", CONVERT_CHILDREN),
    wrong("08.4", "one layer becomes three", "tied", "one layer became several", CONVERT_CHILDREN,
          "module.named_children()", "list(module._modules.items())"),
    wrong("08.4", "images only", "found facts tied",
          "BatchNorm1d, BatchNorm2d and BatchNorm3d are all to be replaced", CONVERT,
          "(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)", "nn.BatchNorm2d"),
    wrong("08.4", "InstanceNorm too", "found", "this is no BatchNorm", CONVERT,
          "(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)", "nn.modules.batchnorm._NormBase"),
    wrong("08.4", "copies by state dict", "state facts tied", "a copy is never trained", CONVERT_BY_STATE_DICT),
    wrong("08.4", "parameters only", "state facts tied", "a new layer starts with buffers of its own", CONVERT,
          "    new.running_mean, new.running_var = old.running_mean, old.running_var\n", ""),
    wrong("08.4", "always in training mode", "facts", "this one was frozen in eval mode", CONVERT,
          "new.train(old.training)", "new"),
    wrong("08.4", "eps and momentum as usual", "facts", "give the new layer eps of the old one", CONVERT,
          "old.num_features, old.eps, old.momentum, old.affine, old.track_running_stats", "old.num_features"),
    wrong("08.4", "affine is taken for granted", "state facts tied", "these are None", CONVERT,
          "new.weight, new.bias = old.weight, old.bias",
          "new.weight.data, new.bias.data = old.weight.data, old.bias.data"),
    wrong("08.4", "returns nothing", ALL, "return the module", CONVERT, "return new.get(module, module)", "new"),
    wrong("08.4", "the module itself is a BatchNorm", "found", "the module given may be a BatchNorm itself", CONVERT,
          "return new.get(module, module)", "return module"),
    wrong("08.4", "the course's own", ALL, "this exercise is to write what it does",
          "def convert(module):\n    return SyncBatchNorm.convert(module)\n"),
    wrong("08.4", "torch's own class", ALL, "torch's own refuses CPU tensors", CONVERT, "SyncBatchNorm(",
          "nn.SyncBatchNorm("),
    wrong("08.4", "into itself, without end", ALL, "convert calls itself without end", CONVERT_CHILDREN,
          "convert(child)", "convert(module)"),
]  # fmt: skip
