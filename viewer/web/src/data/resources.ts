import { type Columns, decodeColumns } from "./columns";
import type { RunData } from "./types";

/** The version of the data that this page reads (docs/viewer-data.md). */
export const VERSION = 1;

export const STEP_TABLES = ["bounds", "work", "stalls", "host", "communication"] as const;

export type StepTables = Record<(typeof STEP_TABLES)[number], Columns>;

/** Reads the run of this page. Throws where the page was cut off, or its data are of another version. */
export function readRun(): RunData {
  const run = JSON.parse(textOf("run")) as RunData;
  if (run.version !== VERSION) {
    throw new Error(
      `the data are of version ${run.version}, this page reads version ${VERSION}: write the report again`,
    );
  }
  return run;
}

/** Reads the tables of a step; `prefix` is `step/12`, or `plan`. */
export async function readStep(prefix: string): Promise<StepTables> {
  const tables = await Promise.all(STEP_TABLES.map((name) => readTable(`${prefix}/${name}`)));
  return Object.fromEntries(STEP_TABLES.map((name, index) => [name, tables[index]])) as StepTables;
}

async function readTable(name: string): Promise<Columns> {
  const bytes = Uint8Array.from(atob(textOf(name)), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return decodeColumns(new Uint8Array(await new Response(stream).arrayBuffer()));
}

function textOf(name: string): string {
  const holder = document.getElementById(`resource:${name}`);
  if (!holder?.textContent)
    throw new Error(`the page does not hold ${name}: was it cut off when it was saved or sent?`);
  return holder.textContent;
}
