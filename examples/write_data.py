"""Write four small files to try ``primal train`` on: a table of houses, and series in three forms.

Every series is a slow or a fast wave with noise, 50 time steps long. Houses have a price.
"""

import numpy as np


def main() -> None:
    rng = np.random.default_rng(0)
    labels = np.array(["slow", "fast"] * 40)
    period = np.where(labels == "slow", 20, 10)[:, None, None]
    phase = rng.uniform(0, 2 * np.pi, (80, 2, 1))
    waves = np.sin(2 * np.pi * np.arange(50) / period + phase)
    waves += 0.3 * rng.standard_normal(waves.shape)  # [cases, channels, time]

    # one row a series: its first channel, and the class in the last column
    rows = [",".join(map("{:.3f}".format, wave[0])) for wave in waves]
    head = ",".join(f"t{step}" for step in range(50))
    with open("table.csv", "w") as file:
        file.write(f"{head},wave\n")
        file.writelines(f"{row},{label}\n" for row, label in zip(rows, labels, strict=True))

    # the format of the UEA archive: channels separated by colons, the class last
    with open("series.ts", "w") as file:
        file.write("@problemName waves\n@classLabel true fast slow\n@data\n")
        for wave, label in zip(waves, labels, strict=True):
            channels = [",".join(map("{:.3f}".format, channel)) for channel in wave]
            file.write(":".join([*channels, label]) + "\n")

    np.savez("arrays.npz", X=waves, y=labels)

    # numbers, words, dates and missing values; the price depends on three columns
    with open("houses.csv", "w") as file:
        file.write("size,rooms,district,built,price\n")
        for size, rooms, year in zip(
            rng.normal(100, 25, 200), rng.integers(1, 7, 200), rng.integers(1950, 2020, 200),
            strict=True,
        ):  # fmt: skip
            district = rng.choice(["north", "south", ""])
            price = size * (3 if district == "north" else 2) + 15 * rooms + rng.normal(0, 8)
            file.write(f"{size:.0f},{rooms},{district},{year}-06-01,{price:.0f}\n")
    print("wrote houses.csv, and table.csv, series.ts and arrays.npz of 80 series each")


if __name__ == "__main__":
    main()
