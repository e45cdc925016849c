"""The rank that held most memory."""

from commtrace.analysis.memory import RankMemory, fullest


def test_the_lowest_of_equally_full_ranks_is_named() -> None:
    peaks = [RankMemory(rank, None, held, held, 1) for rank, held in ((3, 7), (2, 9), (0, 8), (1, 9))]

    assert fullest(peaks).rank == 1
