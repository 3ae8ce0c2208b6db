/* Chooses the leaves of one compilation. The op bodies are compiled once for each macro; the interpreter
 * picks among the compiled tables at run time by cpuid. */
#ifndef K3_LEAVES_SELECT_H
#define K3_LEAVES_SELECT_H

#if defined(K3_LEAVES_SCALAR)
#include "scalar.h"
#elif defined(K3_LEAVES_AVX2)
#include "avx2.h"

#include "tiles.h"

#include "tiles_tokens.h"

#include "tiles_columns.h"
#include "tiles_columns_tokens.h"
#include "tiles_delta.h"
#include "tiles_mix.h"
#include "tiles_scores.h"
#include "tiles_mxfp4.h"
#elif defined(K3_LEAVES_AVX512) || defined(K3_LEAVES_AVX512_BF16)
#ifdef K3_LEAVES_AVX512_BF16
#include "avx512_bf16.h"
#else
#include "avx512.h"
#endif

#include "tiles.h"

#include "panel.h"
#include "panel_pack.h"
#include "panel_coded.h"
#include "panel_once.h"
#include "panel_held.h"
#include "panel_rows.h"

#include "tiles_tokens.h"

#include "tiles_columns.h"
#include "tiles_columns_tokens.h"
#include "tiles_delta.h"
#include "tiles_mix.h"
#include "tiles_scores.h"
#include "tiles_mxfp4.h"
#ifdef K3_LEAVES_AVX512_BF16
#include "tiles_x16.h"
#endif
#else
#error "define K3_LEAVES_SCALAR, K3_LEAVES_AVX2, K3_LEAVES_AVX512 or K3_LEAVES_AVX512_BF16"
#endif

#endif
