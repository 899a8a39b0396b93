"""A few pictures in the layout of Fashion200k, whose descriptions differ in one word."""

from pathlib import Path

from tests.data.compositions.drawn import picture

TRAIN = {
    "dress_train": ["red silk dress", "blue silk dress", "red silk dress", "red wool dress", "odd thing of five words"],
    "top_train": ["green silk top", "green wool top"],
}
TEST = {"dress_test": ["black lace dress", "white lace dress", "white lace dress", "alone & far away"]}


def write_fashion200k(folder: Path) -> Path:
    """The pictures, labels and two published queries; returns the folder."""
    (folder / "labels").mkdir()
    for name, texts in {**TRAIN, **TEST}.items():
        lines = []
        for i, text in enumerate(texts):
            path = f"women/{name}/{i}/{i}_0.jpeg"
            (folder / path).parent.mkdir(parents=True)
            (folder / path).write_bytes(picture((i, len(name), 0), format="JPEG"))
            lines.append(f"{path}\t{-1.5 + i}\t{text}\n")
        (folder / "labels" / f"{name}_detect_all.txt").write_text("".join(lines))
    (folder / "test_queries.txt").write_text(
        "women/dress_test/0/0_0.jpeg women/dress_test/1/1_0.jpeg\n"
        "women/dress_test/2/2_0.jpeg women/dress_test/0/0_0.jpeg\n"
    )
    return folder
