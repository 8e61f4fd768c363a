from __future__ import annotations

from tools.lengths import file_lengths, function_lengths, too_long


def test_functions_and_files_stay_within_their_limits():
    assert too_long() == []


def test_the_report_counts_what_is_there():
    functions = {length.where.rpartition(" ")[2]: length.lines for length in function_lengths()}
    assert functions["quantize"] > 1
    assert any(length.where.endswith("fp8_block.py") for length in file_lengths())
