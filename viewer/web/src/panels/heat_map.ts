import { labelledSelect } from "../controls";
import type { Source } from "../data/source";
import type { Finding, Summary } from "../data/types";
import { byId, element } from "../dom";
import {
  bounded,
  type Cell,
  colourRange,
  type Grid,
  type MapOutline,
  QUANTITIES,
  RankMap,
  ranksText,
  viewOfFinding,
} from "../heat_map/grid";
import { type HeatCells, HeatMap, heatLegend } from "../heat_map/heat_map";
import type { Theme } from "../theme";

const MOST_ROWS = 128;
const MOST_COLUMNS = 256;

/**
 * Shows a value of every rank, by two dimensions or over the steps; to begin with, what shows the costliest finding.
 *
 * `onRank` is called with a rank and maybe steps. Returns what shows a finding; null where there is no heat map.
 */
export async function showHeatMap(
  { alignment, ranks: times, findings }: Summary,
  source: Source,
  theme: Theme,
  onRank: (rank: number, steps?: { first: number; last: number }) => void,
): Promise<((finding: Finding) => void) | null> {
  const [outline, columns] = await Promise.all([source.json<MapOutline>("map.json"), source.table("map")]);
  if (!outline?.blocks.length || !columns) return null;
  const ranks = new Map(times.map((rank) => [rank.rank, rank]));
  const clocks = new Map(alignment.hosts.map((host) => [host.host, host]));
  const map = new RankMap(outline, columns, ranks, alignment.residual_ns ? clocks : new Map());
  const dimensions = map.dimensions();
  const quantities = QUANTITIES.filter((quantity) => map.isKnown(quantity));
  const value = labelledSelect(
    "heat-map-colours",
    "Colours",
    quantities.map(({ name }) => name),
  );
  const rows = labelledSelect("heat-map-rows", "Rows by", dimensions);
  const columnsBy = labelledSelect("heat-map-columns", "Columns by", ["step", ...dimensions]);
  const isGrid = dimensions.includes("dp") && dimensions.includes("pp");
  let marked: ReadonlySet<number> = new Set();
  const heat = new HeatMap(theme);
  const legend = element("div", "", "legend");
  const hint = element("p", "", "hint");
  const show = () => {
    const quantity = quantities.find(({ name }) => name === value.node.value)!;
    const whole = map.grid(quantity, rows.node.value, columnsBy.node.value);
    const grid = bounded(whole, quantity, MOST_ROWS, MOST_COLUMNS);
    const cells = heatCells(grid);
    heat.show(cells, `${quantity.name} of ranks by ${rows.node.value} and ${columnsBy.node.value}`);
    const outlined = element("span", "outlined: named by the finding", "outlined");
    legend.replaceChildren(...heatLegend(cells), ...(marked.size ? [outlined] : []));
    const several = grid.cells.some((cell) => cell && cell.ranks > 1);
    hint.textContent =
      `${quantity.name}: ${quantity.hint}.` +
      (several ? ` A cell of several ranks shows the ${quantity.lowIsBad ? "lowest" : "highest"} of them.` : "");

    function heatCells(shown: Grid): HeatCells {
      return {
        rows: shown.rows,
        columns: shown.columns,
        values: shown.cells.map((cell) => cell?.value ?? null),
        range: colourRange(shown.cells, quantity),
        lowIsStrong: quantity.lowIsBad ?? false,
        format: quantity.format,
        describe: (index) => described(shown, index, quantity.format),
        isMarked: (index) => marked.has(shown.cells[index]?.rank ?? -1),
        onGo: (index) => {
          const cell = shown.cells[index];
          if (cell) onRank(cell.rank, outline!.blocks[cell.block]);
        },
      };
    }
  };
  for (const { node } of [value, rows, columnsBy]) node.addEventListener("change", show);
  const bar = element("div", "", "bar");
  bar.append(value.label, rows.label, columnsBy.label);
  byId("heat-map").append(bar, legend, heat.node, hint);
  byId("heat-map-section").hidden = false;
  const look = (finding: Finding | undefined) => {
    const { quantity, overSteps } = finding ? viewOfFinding(finding) : { quantity: "slowness", overSteps: false };
    if (quantities.some(({ name }) => name === quantity)) value.node.value = quantity;
    [rows.node.value, columnsBy.node.value] = isGrid && !overSteps ? ["dp", "pp"] : ["rank", "step"];
    marked = new Set(finding?.ranks ?? []);
    show();
  };
  look(findings.find(({ kind }) => kind === "slow"));
  return look;
}

function described(grid: Grid, index: number, format: (value: number) => string): string[] {
  const cell: Cell | null = grid.cells[index] ?? null;
  const [row, column] = [grid.rows[Math.floor(index / grid.columns.length)], grid.columns[index % grid.columns.length]];
  const place = `${row}, ${column}`;
  return cell ? [format(cell.value), place, ranksText(cell)] : ["not known", place];
}
