"""A language model of words (pytorch/examples, word_language_model): an LSTM whose state goes from batch to batch, and
gradient descent by hand, with a rate that falls when the loss on other text does not.

What a port of such a loop changes:

- The hidden state is an argument and an output. Each rank has that of its own columns of the text.
- There is no optimizer: the loop changes the parameters itself, and so does the program.
- The rate `lr` is a number that the body reads. When it changes, the step is traced again.
- The validation loss comes through `step.eval`, with the function as it was.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

import ztrans as zt

WORDS, WIDTH, LAYERS, CLIP = 12, 6, 1, 0.25
COLUMNS, BPTT, STEPS = 4, 3, 4


class RNNModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Embedding(WORDS, WIDTH)
        self.rnn = nn.LSTM(WIDTH, WIDTH, LAYERS)
        self.decoder = nn.Linear(WIDTH, WORDS)
        self.decoder.weight = self.encoder.weight

    def forward(self, input, hidden):
        output, hidden = self.rnn(self.encoder(input), hidden)
        return F.log_softmax(self.decoder(output).view(-1, WORDS), dim=1), hidden

    def init_hidden(self, columns):
        weight = next(self.parameters())
        return tuple(weight.new_zeros(LAYERS, columns, WIDTH) for _ in range(2))


def repackage_hidden(h):
    return tuple(v.detach() for v in h)


def data(rank: int, ranks: int) -> list[tuple]:
    """Pieces of a text that stands in columns, each with the words that follow. The last one is for validation."""
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(WORDS, ((STEPS + 1) * BPTT + 1, COLUMNS), generator=generator)
    text = text.chunk(ranks, 1)[rank]
    starts = range(0, len(text) - 1, BPTT)
    return [(text[i : i + BPTT], text[i + 1 : i + 1 + BPTT].flatten()) for i in starts]


def train(data):
    model, lr, best_val_loss = RNNModel(), 20.0, None

    def evaluate(input, targets, hidden):
        output, _ = model(input, hidden)
        return F.nll_loss(output, targets)

    losses = []
    hidden = model.init_hidden(data[0][0].shape[1])
    for input, targets in data[:-1]:
        model.zero_grad()
        hidden = repackage_hidden(hidden)
        output, hidden = model(input, hidden)
        loss = F.nll_loss(output, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        for p in model.parameters():
            p.data.add_(p.grad, alpha=-lr)

        losses.append(loss.item())
        with torch.no_grad():
            val_loss = evaluate(*data[-1], hidden).item()
        losses.append(val_loss)
        if best_val_loss is None or val_loss < best_val_loss:
            best_val_loss = val_loss
        else:
            lr /= 4

    return losses, [model]


def train_on_ranks(data, mesh):
    model, lr, best_val_loss = RNNModel(), 20.0, None

    def evaluate(input, targets, hidden):
        output, _ = model(input, hidden)
        return F.nll_loss(output, targets)

    losses = []
    hidden = model.init_hidden(data[0][0].shape[1])

    def loop_step(input, targets, hidden):
        model.zero_grad()
        hidden = repackage_hidden(hidden)
        output, hidden = model(input, hidden)
        loss = F.nll_loss(output, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        for p in model.parameters():
            p.data.add_(p.grad, alpha=-lr)
        return loss, hidden

    step, state = zt.lift(loop_step, model)
    step = zt.chain(zt.shard_params(mesh), zt.overlap_grads(), zt.prefetch())(step)
    state = step.shard(state)
    evaluate = step.eval(evaluate)
    for input, targets in data[:-1]:
        state, (loss, hidden) = step(state, input, targets, hidden)

        losses.append(loss.item())
        with torch.no_grad():
            val_loss = evaluate(state, *data[-1], hidden).item()
        losses.append(val_loss)
        if best_val_loss is None or val_loss < best_val_loss:
            best_val_loss = val_loss
        else:
            lr /= 4

    zt.write_back(model, (), step.unshard(state))
    return losses, [model]
