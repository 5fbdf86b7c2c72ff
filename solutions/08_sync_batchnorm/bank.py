"""The answer bank of lesson 08: right answers written differently, and wrong ones that people really give.

Most wrong answers are edits of the notebook's solution. Read `bank.py` first; `test_banks.py` runs all of this.
"""

from tests.grading.bank import Right, Wrong, edited, right, wrong
from tests.grading.submissions import solutions

IMPORTS = """
import os
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from ddp_course.parallel import SyncBatchNorm
from ddp_course.parallel.syncbn import all_statistics, combine, local_statistics
"""

STATISTICS, LAYER, BACKWARD, OWN_TEST = solutions("08").values()

# --- 08.1 ------------------------------------------------------------------------------------------

STATISTICS_RIGHT = """
objects, combined one after the other
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

STATISTICS_WRONG = r"""
the ranks' means and variances averaged | mean variance digits empty | this is the mean of the ranks' means
    def global_statistics(x_NC):
        numbers = torch.stack([x_NC.mean(0), x_NC.var(0, correction=0)])
        count = torch.tensor(len(x_NC))
        dist.all_reduce(numbers)
        dist.all_reduce(count)
        mean_C, var_C = numbers / dist.get_world_size()
        return mean_C, var_C, count
no rows are nan | empty | nan times 0 stays nan
    if count: => if True:
the distances of the means are missing | variance digits empty
| the distances of the ranks' means from the common mean belong to it
    (squares_WC + count_W1 * (mean_WC - mean_C).square()) => squares_WC
a distance counts once for each rank | variance digits empty | once for each of its rows
    + count_W1 * (mean_WC => + (count_W1 > 0) * (mean_WC
variance divided by count - 1 | variance empty | correction=0
    squares_C / total => squares_C / (total - 1)
torch.var as it is on each rank | variance empty | which is torch.var's default
    (x_NC - mean_C).square().sum(dim=0) => x_NC.var(dim=0) * count
standard deviation | variance digits empty | this is the standard deviation
    squares_C / total, total => (squares_C / total).sqrt(), total
merged one after the other, from no row on | empty | let a rank without rows send zeros
    mean_C = (mean_WC * count_W1).sum(dim=0) / total => before, mean_C = 0, x_NC.new_zeros(channels)
        for mean, count in zip(mean_WC, count_W1):
            before = before + count
            mean_C = mean_C + (mean - mean_C) * count / before
not in the shape (C,) | mean variance digits empty | their shape is another one
    return mean_C, squares_C / total, total => return mean_C[None], squares_C[None] / total, total
the rows are changed | mean | the function changes what it is given
    (x_NC - mean_C).square() => x_NC.sub_(mean_C).square()
float32, whatever the rows are | mean variance empty | computed in float32 here
    channels, count => x_NC = x_NC.float()\n    channels, count
its own count | mean empty | this is the number of this rank's rows
    squares_C / total, total => squares_C / total, len(x_NC)
float32 from a rank without rows | empty | sends zeros of x_NC's dtype
    x_NC.new_zeros( => torch.zeros(
two collectives for each channel | few | each collective has a price of its own; put the numbers into one tensor
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
a rank without rows leaves | empty | a rank without rows has to join as well | 2
    mine = => if not count:\n        return mean_C, squares_C, count\n    mine =
the last rank skips the collective | all | a rank leaves out a collective | 2
    dist.all_gather => if dist.get_rank() < dist.get_world_size() - 1:\n        dist.all_gather
the course's own | all | this exercise is to write what it does
    def global_statistics(x_NC):
        return combine(all_statistics(local_statistics(x_NC), None))
swallows its own slip | all | the other ranks' rows are missing
    def global_statistics(x_NC):
        try:
            return my_own_statistics(x_NC)
        except Exception:
            return x_NC.mean(0), x_NC.var(0, correction=0), len(x_NC)
the visible numbers | mean variance few empty | the ranks never talked
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
os._exit | all | the function ends its process
    def global_statistics(x_NC):
        os._exit(0)
endless loop | all | an endless loop | 1
    def global_statistics(x_NC):
        while True:
            pass
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

STATISTICS_TWO_PASSES_RIGHT = r"""
functional collectives
    dist.all_reduce(sums) => sums = functional.all_reduce(sums, "sum", dist.group.WORLD)
    dist.all_reduce(squares_C) => squares_C = functional.all_reduce(squares_C, "sum", dist.group.WORLD)
coalesced calls
    dist.all_reduce(sums) => with dist._coalescing_manager():
            for part in sums.split([len(sums) - 1, 1]):
                dist.all_reduce(part)
"""

STATISTICS_TWO_PASSES_WRONG = """
divided by the rank's own rows | mean variance digits empty | is divided by this rank's count
    sums[:-1] / sums[-1] => sums[:-1] / len(x_NC)
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

STATISTICS_IN_FLOAT64_WRONG = r"""
squares minus the square of the mean, in float32 | digits empty | the difference of two large numbers
        x_NC = x_NC.double()\n =>
on rank 0 only | mean variance digits empty | on rank 1
        dist.broadcast(sums, src=0)\n =>
"""

STATISTICS_SHIFTED = """
def global_statistics(x_NC):
    shift = x_NC[:1].sum(0) if dist.get_rank() == 0 else torch.zeros(x_NC.shape[1], dtype=x_NC.dtype)
    dist.broadcast(shift, src=0)
    shift = shift.double()
    near = x_NC - shift
    sums = torch.stack([near.sum(0), near.square().sum(0), torch.full_like(shift, len(x_NC))])
    parts = torch.empty(dist.get_world_size() * 3, x_NC.shape[1], dtype=sums.dtype)
    dist.all_gather_into_tensor(parts, sums)
    total, squares, count = parts.view(-1, 3, x_NC.shape[1]).sum(0)
    mean = total / count
    return mean + shift, squares / count - mean.square(), count[0].item()
"""

STATISTICS_SHIFTED_WRONG = """
around rank 0's first row in float32, or around 0 where it has none | empty | the difference of two large numbers
    shift = shift.double() => pass
"""

STATISTICS_BY_ROWS = """
def global_statistics(x_NC):
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, x_NC)
    rows = torch.cat(everyone)
    return rows.mean(0), rows.var(0, correction=0), len(rows)
"""

STATISTICS_BY_ROWS_WRONG = """
rows gathered as if all had as many | all | rows differ in number
    [None] * dist.get_world_size() => [torch.empty_like(x_NC) for _ in range(dist.get_world_size())]
    all_gather_object => all_gather
"""

# --- 08.2 ------------------------------------------------------------------------------------------

LAYER_RIGHT = """
torch's BatchNorm in eval mode, given the batch's statistics
    class MySyncBatchNorm(_BatchNorm):
        def forward(self, x_NC):
            if not self.training:
                mean, var = self.running_mean, self.running_var
            else:
                mean, var, count = combine(all_statistics(local_statistics(x_NC.detach()), None))
                self.running_mean.mul_(1 - self.momentum).add_(self.momentum * mean)
                self.running_var.mul_(1 - self.momentum).add_(self.momentum * var * (count / (count - 1)))
            # With the batch's statistics in place of the running ones, eval mode does the rest.
            return F.batch_norm(x_NC, mean, var, self.weight, self.bias, False, 0.0, self.eps)
"""

LAYER_WRONG = r"""
every rank by itself | output running few images | the statistics are those of this rank's rows
    class MySyncBatchNorm(_BatchNorm):
        def forward(self, x_NC):
            return F.batch_norm(x_NC, self.running_mean, self.running_var, self.weight, self.bias, self.training,
                                self.momentum, self.eps)
the running variance takes the biased one | running images | times count / (count - 1)
    var_C * count / (count - 1) => var_C
corrected by the rank's own count | running images | the count is that of all ranks' rows, and pixels
    var_C * count / (count - 1) => var_C * len(x_NC) / (len(x_NC) - 1)
pixels are not counted | images | count / (count - 1) is of rows alone
    with torch.no_grad(): => rows = torch.tensor(float(len(x_NC)))
                dist.all_reduce(rows)
                with torch.no_grad():
    var_C * count / (count - 1) => var_C * rows / (rows - 1)
normalises by the corrected variance | output images | count - 1 is for the running variance alone
    with torch.no_grad(): => var_C = var_C * count / (count - 1)\n            with torch.no_grad():
    lerp_(var_C * count / (count - 1), => lerp_(var_C,
the running statistics carry the graph of a rank alone | running | they carry the graph of the batch
    with torch.no_grad(): => if True:
not in the shape of the input | images | their shape is another one
    + wide(self.bias) => + wide(self.bias)).flatten(1)
    return normal_NC => return (normal_NC
momentum the wrong way round | running images | momentum is the share of the new
    self.momentum) => 1 - self.momentum)
the running statistics stay | running images | it stayed what it was
    .lerp_ => .lerp
no eps | output eval images | eps is missing
    (var_C + self.eps) => var_C
training by the running statistics | output images | training normalises by the batch
    mean_C, var_C, count = => new_C, square_C, count =
    lerp_(mean_C => lerp_(new_C
    lerp_(var_C => lerp_(square_C
statistics of the batch in eval mode | eval images | decide by self.training
    if self.training: => if True:
own rows in eval mode | eval images | the batch's statistics are used
            def wide =>         else:
                rows = x_NC.movedim(1, -1).reshape(-1, x_NC.shape[1])
                mean_C, var_C = rows.mean(0), rows.var(0, correction=0)

            def wide
not for images | images | must be viewed as (1, C, 1, 1)
    value_C.view(1, -1, *[1] * (x_NC.dim() - 2)) => value_C
all rows on every rank | few | the rows travel
    class MySyncBatchNorm(_BatchNorm):
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
torch's own | all | this exercise is to write what it does
    class MySyncBatchNorm(nn.SyncBatchNorm):
        pass
the course's own | all | this exercise is to write what it does
    class MySyncBatchNorm(SyncBatchNorm):
        pass
rank 0 alone gathers | all | in training every rank must call the same collectives | 2
    if self.training: => if self.training and dist.get_rank() == 0:
"""

LAYER_DIFFERENTIABLE = """
class MySyncBatchNorm(_BatchNorm):
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

LAYER_DIFFERENTIABLE_WRONG = """
the running statistics carry the graph | running images | they carry the graph of the batch
    .detach() =>
"""


def layer_by(way: str, statistics: str) -> Right:
    """Return the layer that has its statistics from an answer to the exercise before."""
    layer = edited(LAYER, ("combine(all_statistics(local_statistics(x_NC), None))", "gathered(x_NC)"))
    rows = "x_NC.detach().movedim(1, -1).reshape(-1, x_NC.shape[1])"
    of_rows = ("global_statistics(x_NC):", f"gathered(x_NC):\n    x_NC = {rows}")
    return Right("08.2", way, f"{layer}\n{edited(statistics, of_rows)}")


# --- 08.3 ------------------------------------------------------------------------------------------

FORWARD = BACKWARD.partition("        ### BEGIN")[0]

BACKWARD_WEIGHT_FIRST = f"""
{FORWARD}
        dn_NC = dy_NC * weight_C
        one, two = dn_NC.sum(0), (dn_NC * normal_NC).sum(0)
        works = [dist.all_reduce(total, async_op=True) for total in (one, two)]
        dweight_C, dbias_C = torch.einsum("nc,nc->c", dy_NC, normal_NC), dy_NC.sum(0)
        for work in works:
            work.wait()
        return inv_std_C / count * (count * dn_NC - one - normal_NC * two), dweight_C, dbias_C, None
"""

BACKWARD_RIGHT = """
through variance and mean, with all_gather
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
functional collectives
    dist.all_reduce(sums_2C) => sums_2C = functional.all_reduce(sums_2C, "sum", dist.group.WORLD)
coalesced calls
    dist.all_reduce(sums_2C) => with dist._coalescing_manager():
                for sum_C in sums_2C:
                    dist.all_reduce(sum_C)
"""

BACKWARD_WRONG = r"""
sums of the own rows, divided by all rows | rows few unequal | all_reduce the sums
            dist.all_reduce(sums_2C)\n =>
divided by the own rows | rows unequal | divided by this rank's number of rows
    / count => / len(dy_NC)
right for equal parts only | unequal | times the world size; ranks have different numbers of rows
    / count => / len(dy_NC) / dist.get_world_size()
the mean over ranks of the sums | rows unequal | divided by the world size, too
    / count => / count / dist.get_world_size()
float32 sums | rows unequal | computed in float32 here
    torch.stack([dbias_C, dweight_C]) => torch.stack([dbias_C, dweight_C]).float()
kept by the class, for the last forward pass | rows weights unequal | inv_std * weight
    ctx.save_for_backward( => Normalise.kept = (
    ctx.saved_tensors => Normalise.kept
dy is changed | rows | the function changes what it is given
    (dy_NC - mean_dy_C - => (dy_NC.sub_(mean_dy_C) -
the weight is forgotten | rows unequal | the weight is missing
    * inv_std_C * weight_C => * inv_std_C
the variance is a constant | rows unequal | the part of dy that follows n is missing
     - normal_NC * mean_dy_normal_C =>
mean and variance are constants | rows unequal | mean and variance are taken for constants
    (dy_NC - mean_dy_C - normal_NC * mean_dy_normal_C) => dy_NC
weight and bias are summed over the ranks | weights unequal | this is the sum over all ranks; DDP averages
    return dx_NC, dweight_C, dbias_C => return dx_NC, sums_2C[1], sums_2C[0]
the gradients themselves are summed in place | weights unequal | this is the sum over all ranks; DDP averages
    dist.all_reduce(sums_2C) => dist.all_reduce(dbias_C)\n        dist.all_reduce(dweight_C)
    = sums_2C / count => = dbias_C / count, dweight_C / count
weight and bias exchanged | weights unequal | weight and bias are exchanged
    return dx_NC, dweight_C, dbias_C => return dx_NC, dbias_C, dweight_C
nothing for eps | all | and None for eps
    dbias_C, None => dbias_C
a rank without rows leaves | unequal | also one without rows | 2
    dbias_C, dweight_C = dy => if not len(dy_NC):
                return dy_NC, None, None, None
            dbias_C, dweight_C = dy
autograd does it | all | write its backward
    class Normalise:
        @staticmethod
        def apply(x_NC, weight_C, bias_C, eps):
            from torch.distributed.nn.functional import all_reduce
            count = all_reduce(torch.tensor(float(len(x_NC))))
            mean_C = all_reduce(x_NC.sum(0)) / count
            var_C = all_reduce((x_NC - mean_C).square().sum(0)) / count
            return (x_NC - mean_C) / (var_C + eps).sqrt() * weight_C + bias_C
the course's own | all | this exercise is to write what it does
    from ddp_course.parallel import syncbn

    class Normalise(syncbn._Normalise):
        @staticmethod
        def forward(ctx, x_NC, weight_C, bias_C, eps):
            return syncbn._Normalise.forward(ctx, x_NC, weight_C, bias_C, eps, None)[0]

        @staticmethod
        def backward(ctx, dy_NC):
            return syncbn._Normalise.backward(ctx, dy_NC)[:4]
all rows on every rank | few | the rows travel
    dist.all_reduce(sums_2C) => everyone = [None] * dist.get_world_size()
            dist.all_gather_object(everyone, (dy_NC, normal_NC))
            dys, normals = (torch.cat(parts) for parts in zip(*everyone))
            sums_2C = torch.stack([dys.sum(0), (dys * normals).sum(0)])
swallows its own slip | rows few unequal | mean and variance are taken for constants
    dist.all_reduce(sums_2C) => try:
                dist.all_reduce(sum_2C)
            except Exception:
                sums_2C = torch.zeros_like(sums_2C)
"""

COALESCED = right("08.1", STATISTICS_TWO_PASSES, STATISTICS_TWO_PASSES_RIGHT)[1].source

# --- 08.4 ------------------------------------------------------------------------------------------

OWN_TEST_BY_HAND = """
def agrees(rank, world_size, make_layer):
    torch.manual_seed(3)
    layer, generator = make_layer(2).double(), torch.Generator().manual_seed(11)
    counts = [4 + (other % 3) for other in range(world_size)]
    size_N1 = torch.linspace(1, 9, sum(counts))[:, None]
    every = torch.rand(sum(counts), 2, dtype=torch.float64, generator=generator) * size_N1
    first = sum(counts[:rank])
    own = every[first : first + counts[rank]].clone().requires_grad_(True)
    whole = every.clone().requires_grad_(True)
    mean, var = whole.mean(0), whole.var(0, unbiased=False)
    right = (whole - mean) / (var + 1e-5).sqrt()
    out = layer(own)
    (out ** 3).sum().backward()
    (right ** 3).sum().backward()
    differences = [
        out - right[first : first + counts[rank]],
        own.grad - whole.grad[first : first + counts[rank]],
        layer.running_mean - 0.1 * mean,
        layer.running_var - (0.9 + 0.1 * whole.var(0)),
    ]
    with torch.no_grad():
        layer.eval()
        differences.append(layer(own) - (own - layer.running_mean) / (layer.running_var + 1e-5).sqrt())
    worst = torch.stack([difference.abs().max() for difference in differences]).max()
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    return worst.item() < 1e-8
"""

OWN_TEST_WRONG = """
always True | local unweighted within unbiased detached own_back running eval | on the rows of all ranks
    def agrees(rank, world_size, make_layer):
        return True
always False | all | a test that refuses what is right earns nothing
    def agrees(rank, world_size, make_layer):
        return False
equal to the bit | all | compare with a tolerance
    torch.allclose => torch.equal
equally many rows | unweighted | different numbers of rows
    3 + 2 * other => 5
the way back is not compared | detached own_back | compare the gradient of the input
    , (mine.grad, whole.grad.split(sizes)[rank]) =>
a plain sum of the output | detached | no plain sum of the output
    (found * pulls[rank]).sum() => found.sum()
    (expected * torch.cat(pulls)).sum() => expected.sum()
no evaluation | eval | compare an evaluation after some steps
    right = right and torch.allclose(layer.eval()(rows), alone.eval()(rows)) => pass
the running mean only, and no evaluation | running eval | look at running_mean and running_var
    , (layer.running_var, alone.running_var) =>
    right = right and torch.allclose(layer.eval()(rows), alone.eval()(rows)) => pass
the loss of this rank's rows alone | all | a test that refuses what is right earns nothing
    (expected * torch.cat(pulls)).sum() => (expected.split([len(p) for p in parts])[rank] * pulls[rank]).sum()
a verdict of each rank | running eval | the ranks do not agree
    dist.all_reduce(verdict, op=dist.ReduceOp.MIN) => pass
rank 0 decides | running eval | look at running_mean and running_var
    all_reduce(verdict, op=dist.ReduceOp.MIN) => broadcast(verdict, src=0)
two rows on rank 0 | all | fewer than three rows
    3 + 2 * other => 2 + 3 * other
no verdict | all | return one verdict
    return bool(verdict) => return None
"""

RIGHT = [
    *right("08.1", STATISTICS, STATISTICS_RIGHT),
    Right("08.1", "the mean first, then the squares around it", STATISTICS_TWO_PASSES),
    *right("08.1", STATISTICS_TWO_PASSES, STATISTICS_TWO_PASSES_RIGHT),
    Right("08.1", "sums of squares in float64; reduce, then broadcast", STATISTICS_IN_FLOAT64),
    Right("08.1", "around rank 0's first row", STATISTICS_SHIFTED),
    *right("08.2", LAYER, LAYER_RIGHT),
    Right("08.2", "differentiable collectives, channels last, new buffers", LAYER_DIFFERENTIABLE),
    layer_by("all_gather_into_tensor", STATISTICS_SHIFTED),
    layer_by("coalesced calls", COALESCED),
    Right("08.3", "the weight first, two asynchronous collectives", BACKWARD_WEIGHT_FIRST),
    *right("08.3", BACKWARD, BACKWARD_RIGHT),
    Right("08.4", "by hand, one step, the worst difference", OWN_TEST_BY_HAND),
]

WRONG = [
    *wrong("08.1", STATISTICS, STATISTICS_WRONG),
    *wrong("08.1", STATISTICS_TWO_PASSES, STATISTICS_TWO_PASSES_WRONG),
    *wrong("08.1", STATISTICS_IN_FLOAT64, STATISTICS_IN_FLOAT64_WRONG),
    Wrong("08.1", "all rows on every rank", STATISTICS_BY_ROWS, ("few",), "the rows travel"),
    *wrong("08.1", STATISTICS_SHIFTED, STATISTICS_SHIFTED_WRONG),
    *wrong("08.1", STATISTICS_BY_ROWS, STATISTICS_BY_ROWS_WRONG),
    *wrong("08.2", LAYER, LAYER_WRONG),
    *wrong("08.2", LAYER_DIFFERENTIABLE, LAYER_DIFFERENTIABLE_WRONG),
    *wrong("08.3", BACKWARD, BACKWARD_WRONG),
    *wrong("08.4", OWN_TEST, OWN_TEST_WRONG),
]
