from quaff.measure.phases import Phase, phase_table


def test_table_has_a_line_per_phase_and_no_speed_without_tokens() -> None:
    table = phase_table([Phase("load", 0.25), Phase("prefill", 2.0, 2005), Phase("decode", 0.0, 0)])
    assert table.splitlines() == [
        "phase       tokens   seconds   tokens/s",
        "load                   0.250",
        "prefill      2,005     2.000    1,002.5",
        "decode           0     0.000",
    ]
