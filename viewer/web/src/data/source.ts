import { type Columns, decodeColumns } from "./columns";
import type { RunData } from "./types";

/** The version of the data that this page reads (docs/viewer-data.md). */
export const VERSION = 2;

/** Where the data of a run come from. Resources have names; one that is not there gives null. */
export interface Source {
  json<Data>(name: string): Promise<Data | null>;
  table(name: string): Promise<Columns | null>;
}

export const STEP_TABLES = ["bounds", "work", "stalls", "host", "communication"] as const;

export type StepTables = Record<(typeof STEP_TABLES)[number], Columns>;

/** Reads the run. Throws where the page was cut off, or its data are of another version. */
export async function readRun(source: Source): Promise<RunData> {
  const run = await source.json<RunData>("run");
  if (!run) throw new Error("it does not hold a run: was it cut off when it was saved or sent?");
  if (run.version !== VERSION) {
    throw new Error(
      `the data are of version ${run.version}, this page reads version ${VERSION}: write the report again`,
    );
  }
  return run;
}

/** Reads the tables of a step; `prefix` is `step/12`, or `plan`. */
export async function readStep(source: Source, prefix: string): Promise<StepTables> {
  const tables = await Promise.all(STEP_TABLES.map((name) => tableOf(source, `${prefix}/${name}`)));
  return Object.fromEntries(STEP_TABLES.map((name, index) => [name, tables[index]])) as StepTables;
}

async function tableOf(source: Source, name: string): Promise<Columns> {
  const table = await source.table(name);
  if (!table) throw new Error(`the page does not hold ${name}: was it cut off when it was saved or sent?`);
  return table;
}

/** The resources in a report file: script elements, JSON as it is, tables as gzip in base64. */
export class EmbeddedSource implements Source {
  async json<Data>(name: string): Promise<Data | null> {
    const text = embedded(name);
    return text === null ? null : (JSON.parse(text) as Data);
  }

  async table(name: string): Promise<Columns | null> {
    const text = embedded(name);
    if (text === null) return null;
    const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    return decodeColumns(new Uint8Array(await new Response(stream).arrayBuffer()));
  }
}

function embedded(name: string): string | null {
  return document.getElementById(`resource:${name}`)?.textContent || null;
}
