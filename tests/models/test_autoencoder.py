"""jWAE's decoders and discriminator: against loops, torch's modules, and the authors' numbers."""

import torch

from probemb.cross_attention import Tokens
from probemb.losses.jwae import Discriminator, FeatureDecoder, RegionDecoder, WordDecoder, encoder_loss, reconstruction
from tests.losses.points import close

WORDS = torch.tensor([[2, 3, 5, 0, 0], [4, 6, 7, 2, 3], [1, 0, 0, 0, 0]])


def test_a_caption_is_said_word_by_word():
    """One cell at a time: word m from the words before it and the code, in the GRU's first state."""
    torch.manual_seed(0)
    model, z = WordDecoder(9, 4, width=5, hidden=6).double(), torch.randn(3, 4, dtype=torch.float64)
    seen = WORDS.clone()
    seen[1, 2] = 0  # dropped
    cell = torch.nn.GRUCell(5, 6).double()
    cell.load_state_dict({name.removesuffix("_l0"): value for name, value in model.gru.state_dict().items()})
    torch.nn.init.normal_(model.start)
    for row, length in enumerate((3, 5, 1)):
        state, read, said = torch.tanh(model.code(z[row])), model.start, 0.0
        for m in range(length):
            state = cell(read, state)
            said -= model.out(state).log_softmax(-1)[WORDS[row, m]]
            read = model.embedding(seen[row, m])
        close(model.nll(z, WORDS, seen)[row], said.detach())


def test_a_caption_is_said_from_regions_with_attention_to_each():
    """One image, one word, one region at a time, of 4, 2 and 3 regions, the last ones with a gap."""
    torch.manual_seed(0)
    model = RegionDecoder(9, 7, width=5, hidden=6).double()
    torch.nn.init.normal_(model.start)
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 1, 1]], dtype=torch.bool)
    images = Tokens(torch.randn(3, 4, 7, dtype=torch.float64) * mask[..., None], mask)
    reader = torch.nn.GRUCell(7, 6).double()
    reader.load_state_dict({name.removesuffix("_l0"): value for name, value in model.reader.state_dict().items()})
    for row, length in enumerate((3, 5, 1)):
        state, read = torch.zeros(6, dtype=torch.float64), []
        for region in images.values[row]:
            state = reader(region, state)
            read.append(state)
        there = images.mask[row].nonzero()[:, 0].tolist()
        state, word, said = read[there[-1]], model.start, 0.0
        for m in range(length):
            energies = [model.energy((model.key(read[r]) + model.query(state)).tanh())[0] for r in there]
            shares = [energy.exp() / sum(e.exp() for e in energies) for energy in energies]
            attended = sum(share * read[r] for share, r in zip(shares, there))
            state = model.speaker(torch.cat([word, attended]), state)
            said -= model.out(state).log_softmax(-1)[WORDS[row, m]]
            word = model.embedding(WORDS[row, m])
        close(model.nll(images, WORDS, WORDS)[row], said.detach())


def fill(module, v, part, names):
    """Load a module from the arrays `part__param__…` by (ours, theirs) names; all of its parameters must be there."""
    module.load_state_dict({ours: v[f"{part}__param__{theirs}"] for ours, theirs in names})
    return module


def published_modules(v):
    layers = [
        (f"layers.{i}.{k}", f"{name}.{k}")
        for i, name in enumerate(("prep1", "prep12", "prep2"))
        for k in ("weight", "bias")
    ]
    image = fill(FeatureDecoder(8, 10, (8, 8)).double(), v, "img_dec", layers)
    gru = [(f"gru.{k}_l{i}", f"gru.{k}_l{i}") for i in (0, 1) for k in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")]
    own = [("embedding.weight", "emd.weight"), ("code.weight", "fc1.weight"), ("code.bias", "fc1.bias")]
    out = [("out.weight", "out.weight"), ("out.bias", "out.bias")]
    text = fill(WordDecoder(20, 8, 8, 6, published=True).double(), v, "txt_dec", [*gru, *own, *out])
    judge = [(f"layers.{i}.{k}", f"fc{i + 1}.{k}") for i in (0, 1) for k in ("weight", "bias")]
    return image, text, fill(Discriminator(8, 256, published=True).double(), v, "netD", judge)


def test_authors_decoders(tensors):
    """The image decoder, and the text decoder that reads the word it is to say (published)."""
    v = tensors("09_jwae")
    image, text, _ = published_modules(v)
    decoded = image(v["img_emb"])
    close(decoded, v["img_decoded"])
    close(0.05 * reconstruction(v["images"], decoded), v["rec_image_term"])
    seen = v["captions"].masked_fill((v["word_dropout_uniform"] < 0.2) & (v["captions"] >= 2), 0)
    said = v["captions"] != 0
    close(text.out(text.states(v["cap_emb"], seen)).log_softmax(-1)[said], v["txt_logp"][said])
    nll = text.nll(v["cap_emb"], v["captions"], seen)
    close(nll.sum(), v["train_emb__nll"])
    close(0.005 * nll.mean(), v["rec_text_term"])
    total = 0.05 * reconstruction(v["images"], decoded) + 0.005 * nll.mean()
    close(total, v["train_emb__r_tot"])
    total.backward()
    for i, name in enumerate(("prep1", "prep12", "prep2")):
        close(image.layers[i].weight.grad, v[f"train_emb_grad__img_dec__{name}.weight"])
    for ours, theirs in (("embedding", "emd"), ("code", "fc1"), ("out", "out")):
        close(getattr(text, ours).weight.grad, v[f"train_emb_grad__txt_dec__{theirs}.weight"])
    for k in ("weight_ih_l0", "weight_hh_l1", "bias_ih_l1"):
        close(getattr(text.gru, k).grad, v[f"train_emb_grad__txt_dec__gru.{k}"])


def test_authors_discriminator_on_one_region_and_word(tensors):
    """One region and one word of every item; the prior's loss and the codes', and the gradient of their sum."""
    v = tensors("09_jwae")
    _, _, judge = published_modules(v)
    image, text = v["img_emb"][:, int(v["region_index"])], v["cap_emb"][:, int(v["word_index"])]
    close(0.01 * (judge.encoder_loss(image) + judge.encoder_loss(text)), v["train_emb__err_D"])
    close(judge(v["true_gauss"]).sigmoid(), v["netD_on_gauss"][:, 0])
    real, fake = encoder_loss(judge(v["true_gauss"])), encoder_loss(-judge(torch.cat([image, text])))
    close(real, v["errD_real"])
    close(fake, v["errD_fake"])
    (real + fake).backward()
    for i in (0, 1):
        for kind in ("weight", "bias"):
            close(getattr(judge.layers[i], kind).grad, v[f"errD_grad__netD__fc{i + 1}.{kind}"])
