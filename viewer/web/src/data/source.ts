import { type Columns, decodeColumns } from "./columns";
import type { RunData } from "./types";

/** The version of the data that this page reads (docs/viewer-data.md). */
export const VERSION = 2;

/** Where the data of a run come from: resources by name. One that is not there gives null. */
export interface Source {
  json<Data>(name: string): Promise<Data | null>;
  /** A table, with the rows of at least these ranks (indices in the outline) if it is one of boxes. */
  table(name: string, ranks?: readonly number[]): Promise<Columns | null>;
  /** Whether tables hold all ranks that they ever have, so that they are read once. */
  readonly isWhole: boolean;
}

/** Reads the run. Throws where the page was cut off, or its data are of another version. */
export async function readRun(source: Source): Promise<RunData> {
  const run = await existing(source.json<RunData>("run.json"), "run.json");
  if (run.version !== VERSION) {
    throw new Error(
      `the data are of version ${run.version}, this page reads version ${VERSION}: write the report again`,
    );
  }
  return run;
}

/** A resource that must be there. */
export async function existing<Resource>(resource: Promise<Resource | null>, name: string): Promise<Resource> {
  const found = await resource;
  if (found === null) throw new Error(`the page does not hold ${name}: was it cut off when it was saved or sent?`);
  return found;
}

/** The resources in a report file: script elements, JSON as it is, tables as gzip in base64. */
export class EmbeddedSource implements Source {
  readonly isWhole = true;

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
